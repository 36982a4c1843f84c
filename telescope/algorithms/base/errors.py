"""What a method of an algorithm, which may be a user's own, raises: said with its name, its place and the step."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_CHARACTERS = 500
"""Of the error's own first line."""


class AlgorithmRaised(ValueError):
    """The sentence names method, error, file and line; the error itself is the cause."""


@contextmanager
def named(algorithm: object, method: str, when: str) -> Iterator[None]:
    """Within, an error of `algorithm` becomes `AlgorithmRaised`: `step 7: MyRule.token_losses raised KeyError: 'x' (my_rule.py,
    line 31)`. `when`: `step 7`. Named is the innermost of its methods that was at work, with the line that it had come to;
    `method`, without a line, where it had not begun.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        place = ""
        own = error.__traceback__  # this function's, which has `algorithm` first too
        for frame, line in traceback.walk_tb(own.tb_next if own else None):
            code = frame.f_code
            if code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is algorithm:
                method, place = code.co_name, f" ({Path(code.co_filename).name}, line {line})"
        said = (str(error).strip().splitlines() or ["without a word"])[0][:MAX_CHARACTERS]
        raise AlgorithmRaised(
            f"{when}: {type(algorithm).__name__}.{method} raised {type(error).__name__}: {said}{place}"
        ) from error
