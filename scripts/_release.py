"""Builds and checks a release, for scripts/release. Owns when a checkout is ready for one; uploads nothing."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_version(root: Path) -> str:
    """Of pyproject.toml, e.g. `0.2.0`."""
    with (root / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def list_obstacles(root: Path) -> list[str]:
    """Why the checkout is not ready for a release of its version: a sentence each."""
    version, found = read_version(root), []
    cited = re.search(r"^version: *\"?([^\"\s]+)", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if cited is None or cited[1] != version:
        found.append(f"CITATION.cff says version {cited[1] if cited else 'nothing'}, pyproject.toml {version}: make them equal")
    heading = re.search(rf"^# {re.escape(version)}(?: .*)?$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if heading is None:
        found.append(f"CHANGELOG.md has no heading `# {version}`: write what changes with it")
    elif "unreleased" in heading[0]:
        found.append(f"CHANGELOG.md calls {version} unreleased: put the date there")
    if changed := git(root, "status", "--porcelain"):
        found.append(f"{len(changed.splitlines())} files are changed or new and not committed: commit or remove them")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"the tag v{version} is there already: raise the version in pyproject.toml")
    return found


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def build(root: Path, out: Path) -> list[Path]:
    """The source archive, and the wheel made from it; the same bytes from the same commit. Raises CalledProcessError."""
    environ = {**os.environ, "SOURCE_DATE_EPOCH": git(root, "log", "-1", "--format=%ct")}
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, root], env=environ, check=True)
    stem = f"telescope_rl-{read_version(root)}"
    made = [out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
    return made


def tell_how_to_publish(made: list[Path], version: str) -> str:
    """The lines to type."""
    return (
        "Nothing is tagged or uploaded. To publish it:\n"
        f'  git tag --sign v{version} -m "Telescope {version}" && git push origin v{version}\n'
        f"  python -m twine upload {' '.join(map(str, made))}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER", help="where to build (dist/)")
    parser.add_argument("--rehearse", action="store_true", help="build though the checkout is not ready for a release")
    asked = parser.parse_args(arguments)
    if shutil.which("git") is None:
        print("git is not installed: a release is made of a commit.", file=sys.stderr)
        return 1
    obstacles = list_obstacles(ROOT)
    for sentence in obstacles:
        print(f"not ready: {sentence}", file=sys.stderr)
    if obstacles and not asked.rehearse:
        print("Nothing was built; --rehearse builds all the same.", file=sys.stderr)
        return 1
    try:
        made = build(ROOT, asked.out.absolute())
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    for path in made:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    print("A rehearsal: not to be published." if obstacles else tell_how_to_publish(made, read_version(ROOT)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
