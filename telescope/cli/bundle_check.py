"""`python -m telescope.cli.bundle_check BUNDLE.JSON`: does the host have what its bundle leaves out, in versions that fit?

`install.sh` asks it last, in an environment where some packages are the host's own: pip has installed the others as they are
and compared nothing. Reads what is installed; changes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OK, MISSING, USAGE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """0, also where a version is not the one asked for, which is said; 1 where a package is missing; 2 on wrong usage."""
    if len(arguments) != 1:
        sys.stderr.write("telescope.cli.bundle_check: name one bundle.json\n")
        return USAGE
    told = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    asked = [Requirement(line) for line in told["install"]]
    missing, others = [], []
    for owner, need in needs(asked, [file.partition("-")[0] for file in told["wheels"]]):
        there = version(need.name)
        if there is None:
            missing.append(f"{need.name} is neither in the bundle nor on this host: {owner} needs {need}")
        elif not need.specifier.contains(there, prereleases=True):
            others.append(f"Warning: {need.name} is {there} here, and {owner} asks for {need}")
    sys.stderr.write("".join(f"{line}\n" for line in dict.fromkeys((*missing, *others))))
    return MISSING if missing else OK


def needs(asked: Sequence[Requirement], bundled: Iterable[str]) -> Iterator[tuple[str, Requirement]]:
    """What the bundle was to have, and what each package in it, with the extras asked of it, needs: (who, what)."""
    yield from (("this bundle", line) for line in asked)
    extras = {canonicalize_name(line.name): sorted(line.extras) for line in asked}
    for name in map(canonicalize_name, bundled):
        for need in map(Requirement, metadata.requires(name) or ()):
            marker, need.marker = need.marker, None
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras.get(name, []))):
                yield f"{name} {metadata.version(name)}", need


def version(name: str) -> str | None:
    """Of an installed package, seen as Python sees it; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
