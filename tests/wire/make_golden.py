"""The golden bytes: `python -m tests.wire.make_golden` compares, `--update` writes. One file a message, one line a frame.

A change here is a change of the protocol: give it a new version (docs/protocol.md) unless nothing was released with the old.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.wire.samples import SAMPLES, Sample

FOLDER = Path(__file__).parent / "golden"


def path_of(sample: Sample) -> Path:
    return FOLDER / f"{sample.name}.hex"


def text_of(sample: Sample) -> str:
    return "".join(f"{frame.hex()}\n" for frame in sample.frames())


def read(path: Path) -> list[bytes]:
    return [bytes.fromhex(line) for line in path.read_text(encoding="ascii").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the files anew")
    update = parser.parse_args().update
    present = {path: path.read_text("ascii") for path in FOLDER.glob("*.hex")}
    different = [sample for sample in SAMPLES if present.get(path_of(sample)) != text_of(sample)]
    for sample in different:
        print(f"{'updated' if update else 'differs'}: {path_of(sample).name}")
        if update:
            path_of(sample).write_text(text_of(sample), encoding="ascii")
    return 0 if update or not different else 1


if __name__ == "__main__":
    sys.exit(main())
