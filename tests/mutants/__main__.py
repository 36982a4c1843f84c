"""`python -m tests.mutants`: every mutant and the test that notices it; with WORDS those whose name has them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.mutants.judging import NotCaught, catch
from tests.mutants.planting import NoLongerApplies
from tests.mutants.table import MUTANTS


def main(words: Sequence[str]) -> int:
    """0: all are caught, 1: one is not, 2: no mutant has this name."""
    asked = " ".join(words)
    chosen = [mutant for mutant in MUTANTS if asked in mutant.name]
    if not chosen:
        print(f"no mutant's name has {asked!r} in it; there are:", *(mutant.name for mutant in MUTANTS), sep="\n  ")
        return 2
    left = 0
    for mutant in chosen:
        began = time.monotonic()
        try:
            verdict = f"caught by {catch(mutant)}"
        except (NoLongerApplies, NotCaught) as error:
            left, verdict = left + 1, f"NOT CAUGHT: {error}"
        print(f"{time.monotonic() - began:5.1f} s  {mutant.name}\n         {verdict}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} mutants are caught")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
