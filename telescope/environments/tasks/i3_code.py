"""The programming tasks of INTELLECT-3's training data: programs that read and print, and functions that are called, scored by
up to 16 tests in a sandbox. https://huggingface.co/datasets/PrimeIntellect/INTELLECT-3-RL
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from telescope.environments.questions.dataset import Instruction
from telescope.environments.tasks.code_generation import CodeGeneration

PRELUDE = """\
import bisect, collections, copy, datetime, functools, heapq, io, itertools, math, operator, os, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, islice, pairwise, permutations, product
from itertools import repeat, zip_longest
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, log10, perm, pi, prod, sqrt
from typing import Any, Callable, Deque, Dict, Generator, Iterable, Iterator, List, Optional, Set, Tuple, Union
"""
"""What judges of such tasks have imported: half of them begin with `class Solution:` and take `List` for granted."""


class I3Code(CodeGeneration):
    """Reward 1 where all tests pass. It has a train split alone, of which a part is held out."""

    dataset: str = "PrimeIntellect/INTELLECT-3-RL"
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = ("code",)
    """Its configurations, one after another; empty: its only one."""
    eval_split: str | None = None
    """The data set's split that is held out; null: `held_out` rows of the train split."""
    question_field: str = "question"
    """Column of the question; a dotted path reaches into it, through JSON text as well (`info.question`)."""
    tests_field: str = "info.tests"
    """Column of the tests, or a dotted path to them. docs/sandboxes.md shows the forms they may have."""
    setup_field: str | None = None
    """Column of code that goes before each assertion, e.g. imports; null: none."""
    solution_field: str | None = None
    """Column of a right program, shown beside the policy's answer; null: none."""
    prelude: str = PRELUDE
    """Code that goes before every answer, e.g. imports that the questions take for granted."""
    instruction: Instruction = "{question}\n\nSolve this with a Python program. Put all of it into one ```python block."
    """The user's message; {question} is filled in."""
    shown_tests: int = Field(default=0, ge=0)
    """Tests shown below the question: without one, the name of the wanted function is often unknown."""
    unreadable: Literal["refuse", "leave_out"] = "leave_out"
    """What becomes of rows without tests that can be read: none is taken (the worker ends with the first of them), or they are
    left out and counted in the worker's log."""
    number_tolerance: float = Field(default=1e-3, ge=0, le=0.1)
    """How far a printed number that is not an integer may be from the wanted one, absolutely or as a share of it; then words
    are compared, and white space does not count. 0: the text must be the same."""
    test_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds that one test may take; not more than `sandbox.limits.time_s`."""
    total_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that all tests of an answer may take; those not begun by then have failed."""
