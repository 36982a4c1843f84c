"""What every system is given to do: which model, how long prompts and answers are, how many a step.

Owns the model's folder and the prompts. An answer has exactly as many tokens as it may have: the tokenizer's end token lies
beyond the model's vocabulary, so that no system can draw it, and none needs an option that ignores ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shapes import SHAPES, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS = {"tiny": 16, "4B": 128}
"""Rollouts of a step where none are asked for; of other shapes `MANY`."""
MANY = 256


@dataclass(frozen=True)
class Workload:
    """The same for all systems of a table, which refuses files that differ in any of it."""

    shape: str
    prompt_tokens: int
    answer_tokens: int
    rollouts: int
    """Of a step, and so of an optimiser update."""
    group_size: int
    learning_rate: float
    compute_dtype: str
    """Of forward and backward: bfloat16, on a CPU float32."""

    @property
    def groups(self) -> int:
        """Prompts of a step."""
        return self.rollouts // self.group_size

    @property
    def row(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + self.answer_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that every peer's command has."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6B")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--rollouts", type=int, help="of a step; by default 256, of 4B 128")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=8, help="the first two are not counted")
    parser.add_argument("--models", type=Path, default=Path("runs/models"), help="where drawn models are kept")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU, in float32")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds that the whole run may take")
    parser.add_argument("--out", type=Path, help="the file of figures, JSON; by default in runs/peers")


def workload_of(given: argparse.Namespace) -> Workload:
    """What the options ask for. Ends the program where groups do not fill a step."""
    rollouts = given.rollouts or ROLLOUTS.get(given.shape, MANY)
    if rollouts % given.group_size:
        raise SystemExit(f"--rollouts={rollouts} is not a multiple of --group-size={given.group_size}")
    return Workload(
        shape=given.shape,
        prompt_tokens=given.prompt,
        answer_tokens=given.answer,
        rollouts=rollouts,
        group_size=given.group_size,
        learning_rate=given.learning_rate,
        compute_dtype="float32" if given.cpu else "bfloat16",
    )


def make_endless_model(shape: str, models: Path) -> Path:
    """The drawn model in a folder whose end token has the first id that the model has no logit for; kept if it is there. Its
    configuration names none: vLLM refuses to stop at an id that it cannot draw."""
    folder, vocabulary = models.absolute() / f"{shape}-endless", SHAPES[shape].vocabulary
    done = folder / "endless"
    if not done.exists():
        command = [sys.executable, "-m", "benchmarks.shapes", shape, str(folder)]  # what it draws with on a GPU ends with it
        subprocess.run(command, cwd=ROOT, check=True)
        write_tokenizer(folder, vocabulary + 1, end=f"w{vocabulary}")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}, indent=2) + "\n")
        done.touch()
    return folder


def draw_prompts(count: int, tokens: int) -> list[str]:
    """The first prompts of the environment `letters`, which Telescope is trained on."""
    from benchmarks.plugins.environments.letters import Letters

    prompts = Letters(length=tokens).prompts("train")
    return [prompts[index].turns[0]["content"] for index in range(count)]
