"""Which files of the product one rollout goes through, from its prompt to its gradient, as a run shows.

A run with a fake engine and a fake backend trains a few steps of one rollout each, and nothing of the next step begins before
the weights of the last are served. So between the moment that the engine has committed a version and the moment that the
backend has trained the next step, all processes together do what one rollout needs: its prompt is drawn, it is ordered, played,
scored, written down, put into a batch, and trained. Counted are the files of which a function ran in each of these windows, in
any process. Not counted are module and class bodies, what ran in the first window (caches are filled then), and what ran in
some windows only (timers). With a real engine and backend the files in their folders would come on top.

A type carries the rollout where it has a field `rollout_id`, or a field that holds such a type, and is handed to a function of
the product within a window.

Each process is watched by `sys.setprofile`, which a `sitecustomize` in a folder on PYTHONPATH turns on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN = re.compile(r"\w*Engine\.commit")
END = re.compile(r"\w*Backend\.train_step")
"""By the names of methods that any engine and any backend has."""
PRODUCT = ("telescope", "launch")
STEPS = 6
RUN = (
    *("-m", "telescope.run", "experiment=fake", f"number_of_steps={STEPS}", "orchestrator.max_async_rollout=0"),
    *("algorithm=reinforce_pp", "rollout.group_size=1", "rollout.min_group_size=1"),
    "orchestrator.prompts_batch_size_for_trainer=1",
)
LIMIT_S = 300.0

WATCH = '''
"""Writes down each call of a function of the product: time, file, function, and the types handed to it that carry a rollout."""

import os
import sys
import threading
import time

ROOT = os.environ["TRACE_ROOT"]
PRODUCT = tuple(os.path.join(ROOT, name) + os.sep for name in os.environ["TRACE_PRODUCT"].split())
OUT = os.open(os.path.join(os.environ["TRACE_OUT"], str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
OPTIMISED = 1  # the flag of a function's code; bodies of modules and classes lack it
KEY = "rollout_id"
files, kinds = {}, {}


def file_of(code):
    """Its path from the checkout's top; empty where it is not a function of the product."""
    if not code.co_flags & OPTIMISED or not code.co_filename.startswith(PRODUCT):
        return ""
    return os.path.relpath(os.path.realpath(code.co_filename), ROOT)


def fields(value):
    """Names of the values that an object of a type of the product has; nothing of other types."""
    kind = type(value)
    if kind not in kinds:
        module = sys.modules.get(kind.__module__)
        ours = os.path.realpath(getattr(module, "__file__", None) or "").startswith(PRODUCT)
        told = [getattr(kind, name, ()) for name in ("__struct_fields__", "__dataclass_fields__", "__slots__")]
        kinds[kind] = {name for names in told for name in names} if ours and not issubclass(kind, type) else None
    return () if kinds[kind] is None else {*kinds[kind], *getattr(value, "__dict__", ())}


def carries(value):
    own = fields(value)
    return KEY in own or any(KEY in fields(getattr(value, name, None)) for name in own)


def watch(frame, event, argument):
    if event not in ("call", "return"):
        return
    code = frame.f_code
    file = files.get(code)
    if file is None:
        file = files[code] = file_of(code)
    if not file:
        return
    types = ""
    if event == "call":
        values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        types = ",".join({f"{type(value).__module__}.{type(value).__qualname__}" for value in values if carries(value)})
    os.write(OUT, f"{time.monotonic():.7f}\\t{event}\\t{file}\\t{code.co_qualname}\\t{types}\\n".encode())


threading.setprofile(watch)
sys.setprofile(watch)
'''


@dataclass(frozen=True)
class Call:
    """A line of a process's trace. `event`: call or return (of a coroutine also whenever it waits)."""

    at: float
    event: str
    file: str
    function: str
    types: tuple[str, ...]


@dataclass(frozen=True)
class Rollout:
    files: Sequence[str]
    types: Sequence[str]


def trace(root: Path) -> Rollout:
    """Run the checkout `root` and count. Ends the program with a sentence where the run fails."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        watching, out = Path(folder, "watching"), Path(folder, "out")
        watching.mkdir()
        out.mkdir()
        (watching / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{watching}{os.pathsep}{root}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TRACE_ROOT": str(root),
            "TRACE_PRODUCT": " ".join(PRODUCT),
            "TRACE_OUT": str(out),
        }
        answer = subprocess.run(
            [sys.executable, *RUN, f"run_dir={folder}/run"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if answer.returncode:
            raise SystemExit(f"the traced run in {root} failed, so its rollouts are not counted:\n{answer.stderr[-2000:]}")
        return counted([call for file in sorted(out.iterdir()) for call in read(file.read_text(encoding="utf-8").splitlines())])


def read(lines: Iterable[str]) -> list[Call]:
    """A process's trace; a last line that the end of the process cut off is left out."""
    parts = (line.split("\t") for line in lines)
    return [
        Call(float(at), event, file, function, tuple(types.split(",")) if types else ())
        for at, event, file, function, types in (part for part in parts if len(part) == 5)
    ]


def windows(calls: Iterable[Call]) -> list[tuple[float, float]]:
    """From each end of a training step back to the last commit before it; the first, of the base model's weights, has none."""
    returns = sorted((call for call in calls if call.event == "return"), key=lambda call: call.at)
    found, begun = [], None
    for call in returns:
        if BEGIN.fullmatch(call.function):
            begun = call.at
        elif END.fullmatch(call.function) and begun is not None:
            found.append((begun, call.at))
            begun = None
    return found


def counted(calls: Sequence[Call]) -> Rollout:
    """What was called in every window. Ends the program where there is none."""
    found = windows(calls)
    if not found:
        raise SystemExit(
            f"the trace has no {BEGIN.pattern} before a {END.pattern}: tell scripts/_rollout_trace.py their new names"
        )
    within = [[call for call in calls if call.event == "call" and begin <= call.at <= end] for begin, end in found]
    files = set.intersection(*({call.file for call in window} for window in within))
    types = set.intersection(*({kind for call in window for kind in call.types} for window in within))
    return Rollout(sorted(files), sorted(types))
