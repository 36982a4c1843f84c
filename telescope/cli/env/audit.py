"""`python -m telescope env audit RUN_DIR [--step N | --rollout ID]`: a trajectory token by token, as it was trained.

For each token its id and text, whether the policy sampled it, and if so the weight version and log-prob of whoever did, with
the advantage of its rollout; with `--recompute` beside it the log-prob that transformers finds for the same token on this
machine's CPU: what the trainer sees of it. Only tokens that the given version of the weights sampled can be compared, and
weights are not looked for: the base model is version 0, and a folder of any other version is named by whoever asks. A run keeps
the tokens of the first groups of each step (`logging.token_groups`). Reads a run that is over or still goes on; writes nothing.
Exit codes: 0 fine, 1 nothing to show or unreadable, 2 usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from telescope.cli.arguments import from_one
from telescope.config.models import ModelNotFound, model_folder
from telescope.config.run import RunConfig
from telescope.maths.support import Support, left_out
from telescope.runlog import opening
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.workers.tokenizer import TokenizerError, load_template

if TYPE_CHECKING:
    from torch import Tensor

OK, NOT_FINE = 0, 1
WIDEST = 32
HEAD = f"{'#':>6} {'id':>7} {'mask':>4} {'version':>7} {'log-prob':>10} {'advantage':>10}  text"
UP_TO_LOGPROB = HEAD.index("log-prob") + len("log-prob")
Decode = Callable[[int], str]


class NothingToShow(ValueError):
    """The run has no such tokens; the sentence says which it has."""


def main(arguments: Sequence[str]) -> int:
    parser = _make_parser()
    asked = parser.parse_args(list(arguments))
    if (asked.weights is None) != (asked.version is None):
        parser.error("--weights FOLDER and --version N go together: which version of the weights the folder holds")
    run = RunDirectory(Path(asked.run_directory))
    try:
        config = opening.read(run)
        chosen = choose(rows(run, "tokens"), step=asked.step, rollout=asked.rollout, folder=asked.run_directory)
        decode, recomputer = _make_decoder(config), _load_recomputer(config, asked)
    except (NothingToShow, ModelNotFound, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return NOT_FINE
    for line in write_report(chosen, decode, sampled_only=asked.sampled_only, recomputer=recomputer):
        sys.stdout.write(line + "\n")
    return OK


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope env audit", description="Print trajectories token by token.")
    parser.add_argument("run_directory", metavar="RUN_DIR")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=from_one, help="the kept rollouts of this step (default: one of the latest step)")
    which.add_argument("--rollout", type=int, help="this rollout alone")
    parser.add_argument("--sampled-only", action="store_true", help="leave the tokens of prompts out")
    parser.add_argument("--recompute", action="store_true", help="log-probs once more, by the run's base model (version 0)")
    parser.add_argument("--weights", metavar="FOLDER", help="… by these weights instead, a Hugging Face folder, with --version")
    parser.add_argument("--version", type=int, metavar="N", help="the version that --weights holds")
    return parser


def choose(kept: Sequence[Mapping[str, Any]], *, step: int | None, rollout: int | None, folder: str) -> list[Mapping[str, Any]]:
    """The rows to show, branches of a rollout together. Raises `NothingToShow`."""
    if not kept:
        raise NothingToShow(
            f"{folder} keeps no tokens: it is not a run directory, has trained no step yet, or had logging.token_groups=0"
        )
    if step is None and rollout is None:
        latest = max(row["step"] for row in kept)
        rollout = next(row["rollout_id"] for row in kept if row["step"] == latest)
    chosen = [row for row in kept if (row["step"] == step if step is not None else row["rollout_id"] == rollout)]
    if not chosen:
        have = sorted({row["step" if step is not None else "rollout_id"] for row in kept})
        what = f"step {step}" if step is not None else f"rollout {rollout}"
        raise NothingToShow(f"the tokens of {what} were not kept; there are those of {_list_numbers(have)}")
    return sorted(chosen, key=lambda row: (row["step"], row["rollout_id"], row["branch"]))


def write_report(
    chosen: Sequence[Mapping[str, Any]], decode: Decode, *, sampled_only: bool = False, recomputer: Recomputer | None = None
) -> Iterator[str]:
    """Lines for a person."""
    for row in chosen:
        found = None if recomputer is None else recomputer.logprobs(row)
        sampled = sum(row["mask"])
        why = f", left out of the loss by {', '.join(row['filtered'])}" if row.get("filtered") else ""
        yield (
            f"step {row['step']}  group {row['group_id']}  rollout {row['rollout_id']}  branch {row['branch']}: "
            f"{len(row['ids'])} tokens, {sampled} sampled, reward {row['reward']:g}, advantage {row['advantage']:+.4f}{why}"
        )
        yield _write_head(recomputer)
        yield from _list_tokens(row, decode, sampled_only, found)
        if found is not None:
            yield describe_difference(row, found)
        yield ""


def _write_head(recomputer: Recomputer | None) -> str:
    if recomputer is None:
        return HEAD
    beside = f"version {recomputer.version}"
    return f"{HEAD[:UP_TO_LOGPROB]} {beside:>11} {'|diff|':>8}{HEAD[UP_TO_LOGPROB:]}"


def _list_tokens(row: Mapping[str, Any], decode: Decode, sampled_only: bool, found: np.ndarray | None) -> Iterator[str]:
    second = [math.nan] * len(row["logprobs"]) if found is None else found.tolist()
    sampled = zip(row["versions"], row["logprobs"], second, strict=True)
    advantages = iter(list_advantages(row))
    for at, (token, mask) in enumerate(zip(row["ids"], row["mask"], strict=True)):
        if mask:
            version, logprob, other = next(sampled)
            advantage = next(advantages)
            beside = "" if found is None else _write_beside(logprob, other)
            numbers = f"{version:>7} {logprob:>10.5f}{beside} {advantage:>+10.4f}"
        elif sampled_only:
            continue
        else:
            beside = "" if found is None else _write_beside(math.nan, math.nan)
            numbers = f"{'·':>7} {'·':>10}{beside} {'·':>10}"
        yield f"{at:>6} {token:>7} {mask:>4} {numbers}  {_shorten(decode(token))}"


def list_advantages(row: Mapping[str, Any]) -> list[float]:
    """Of the row's sampled tokens in order: the rollout's, or that of the turn which a token belongs to."""
    if row.get("filtered"):
        return [0.0] * sum(row["mask"])
    turns = row.get("turns") or [[sum(row["mask"]), row["advantage"]]]
    return [advantage for tokens, advantage in turns for _ in range(tokens)]


def _write_beside(logprob: float, other: float) -> str:
    """The log-prob by the other weights and its distance; points where these did not sample the token."""
    return f" {'·':>11} {'·':>8}" if math.isnan(other) else f" {other:>11.5f} {abs(other - logprob):>8.1e}"


def _shorten(text: str) -> str:
    quoted = repr(text)
    return quoted if len(quoted) <= WIDEST else f"{quoted[: WIDEST - 1]}…"


def _list_numbers(numbers: Sequence[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:6]))}, …, {', '.join(map(str, numbers[-3:]))} ({len(numbers)} in all)"


def _load_recomputer(config: RunConfig, asked: argparse.Namespace) -> Recomputer | None:
    """Raises `ModelNotFound` or OSError."""
    if not asked.recompute and asked.weights is None:
        return None
    folder = model_folder(config.model.name) if asked.weights is None else Path(asked.weights)
    return Recomputer.load(folder, asked.version or 0, config.rollout.temperature, config.rollout.support)


def _make_decoder(config: RunConfig) -> Decode:
    """Text of a token by the run's own tokenizer; where that is not to be had (a hub model, offline), none, which is said."""
    model = config.model
    try:
        template = load_template(model, model_folder(model.name))
    except (ModelNotFound, TokenizerError) as error:
        sys.stderr.write(f"texts are left out: {error}\n")
        return lambda token: ""
    return lambda token: template.decode([token])


class Recomputer:
    """One version's weights, in float32. `temperature`: the run's, for rows of runs that had no other."""

    def __init__(self, model: Any, version: int, temperature: float, support: Support) -> None:
        self._model = model
        self.version = version
        self._temperature = temperature
        self._support = support

    @classmethod
    def load(cls, folder: Path, version: int, temperature: float, support: Support) -> Recomputer:
        """Of a Hugging Face folder. Raises OSError where it holds no model."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, version, temperature, support)

    def logprobs(self, row: Mapping[str, Any]) -> np.ndarray:
        """[S] float32 of the row's sampled tokens, NaN where another version sampled them."""
        places = np.flatnonzero(np.asarray(row["mask"]))
        mine = np.asarray(row["versions"]) == self.version
        found = np.full(len(places), np.nan, np.float32)
        if mine.any():
            found[mine] = self._score(row["ids"], places[mine], row.get("temperature") or self._temperature)
        return found

    def _score(self, ids: Sequence[int], places: np.ndarray, temperature: float) -> np.ndarray:
        import torch

        given, asked = torch.tensor(ids)[None], torch.from_numpy(places)
        with torch.inference_mode():
            # A token's log-prob stands at the place before it; logits of no other places are made.
            logits: Tensor = self._model(given, use_cache=False, logits_to_keep=asked - 1).logits[0].float() / temperature
            targets = given[0, asked]
            if not self._support.is_whole:
                logits = logits.masked_fill(left_out(logits, targets, self._support), -float("inf"))
            scored: np.ndarray = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
        return scored


def describe_difference(row: Mapping[str, Any], found: np.ndarray) -> str:
    """`recomputed with version 0 …` in one line: how far the two are apart."""
    apart = np.abs(found - np.asarray(row["logprobs"], np.float32))
    apart = apart[~np.isnan(apart)]
    if not len(apart):
        return f"none of its {len(found)} sampled tokens is of that version"
    return (
        f"{len(apart)} of its {len(found)} sampled tokens recomputed: |difference| {apart.mean():.2e} in the mean, "
        f"{apart.max():.2e} at most"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
