"""`telescope eval TARGET… [overrides]`: play evals outside training; `telescope eval compare A B`: compare two results.

A target is a run directory (its checkpoints, `--steps`), a model (a Hugging Face folder or name, an embedded one), or the URL
of an OpenAI-compatible server. The processes of a run play each, without trainers; the same command again goes on
where it was stopped, and plays nothing twice. Owns the command line, and what is told at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.cli.command_line import parse_all
from telescope.exit_codes import BY_SIGNAL, DONE, ERROR
from telescope.runlog.layout import RunDirectory

if TYPE_CHECKING:
    from telescope.cli.eval_jobs import EvalJob

OK, FAILED, USAGE = DONE, ERROR, 2
DESCRIPTION = """Play evals outside training.

  telescope eval runs/my-run --steps 20,40             checkpoints of a run; 0: its initial model
  telescope eval Qwen/Qwen3-0.6B 'evals.math500={}'    a model: a name, or a Hugging Face folder
  telescope eval http://host:8000/v1 --model NAME 'evals.gsm8k={}'
                                                       an OpenAI-compatible server
  telescope eval compare RUN@20 RUN@40                 two results, prompt by prompt

Of a run, its own evals are played unless overrides name others. The same command again goes on where it was stopped."""


def main(arguments: Sequence[str]) -> int:
    """0 when all is played, 1 where something was refused or failed, 2 on wrong usage, else as `telescope run`."""
    if list(arguments)[:1] == ["compare"]:
        from telescope.cli.eval_compare import compare

        return compare(list(arguments)[1:])
    asked = _parse(arguments)
    from telescope.cli.eval_jobs import list_jobs
    from telescope.cli.resume import WrongOverride
    from telescope.cli.start import say
    from telescope.cli.targets import TargetRefused, is_override
    from telescope.compose.load import UsageError
    from telescope.runlog.eval_rows import CHANGED, PLAYED
    from telescope.runlog.files import DamagedFile

    targets = [one for one in asked.given if not is_override(one)]
    overrides = [one for one in asked.given if is_override(one)]
    if not targets:
        sys.stderr.write("telescope eval: name what is to be evaluated: a run directory, a model or a URL; --help says more\n")
        return USAGE
    if asked.to is not None and len(targets) > 1:
        sys.stderr.write(f"telescope eval: --to {asked.to} is the folder of one result, and there are {len(targets)} targets\n")
        return USAGE
    code, rows = OK, list[dict[str, Any]]()
    try:
        jobs = [job for target in targets for job in list_jobs(target, asked, overrides)]
        for job in jobs:
            try:
                ended, played = _play(job), list(_read_rows(job))
            except (TargetRefused, DamagedFile) as error:  # of this job alone: a checkpoint may be gone by its turn
                say(f"telescope eval: {error}")
                code = FAILED
                continue
            rows += played
            for row in played:
                if row["state"] == CHANGED:
                    say(job.describe_change(row["eval"]))
                    ended = FAILED
                elif row["state"] == PLAYED and not row["scored"]:
                    say(f"{job.label}: no sample of {row['eval']} was scored; the logs in {job.folder} say why")
                    ended = ended or FAILED
            code = ended or code
            if ended in BY_SIGNAL:
                break
    except (UsageError, WrongOverride) as error:
        say(f"telescope eval: {error}")
        return USAGE
    except TargetRefused as error:
        say(f"telescope eval: {error}")
        code = FAILED
    for row in rows:
        if row.get("failed") and row.get("scored"):
            say(_describe_failed(row))
    if asked.json:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
    elif rows:
        sys.stdout.write("\n".join(format_table(rows)) + "\n")
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="telescope eval",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("given", nargs="*", metavar="TARGET|OVERRIDE", help="what to evaluate; settings, as for telescope run")
    parser.add_argument(
        "--steps", default="last", metavar="LIST", help="of a run: 20,40 | last (default) | all; 0: before step 1"
    )
    parser.add_argument("--model", metavar="NAME", help="of a URL: the model that the server is asked for")
    parser.add_argument(
        "--key-env",
        metavar="VARIABLE",
        help="of a URL: holds its key (default: OPENAI_API_KEY, if set)",
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="of a model or a URL: where results lie (default: runs/evals/…)")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder with your own presets and plug-ins")
    parser.add_argument("--json", action="store_true", help="print a JSON object an eval and step, and no table")
    return parse_all(parser, arguments)


# ---- playing


def _play(job: EvalJob) -> int:
    """The exit code of the run that plays it; 0 where it was played before."""
    from telescope._launch.process_plan import PlanError, describe_shared_gpus
    from telescope._launch.this_host import find_smallest_card
    from telescope.cli.start import RunOrder, find_absent, find_obstacles, make_plan_here, run_one, say, settle
    from telescope.cli.targets import TargetRefused, describe_key
    from telescope.config.models import hub_problem
    from telescope.runlog import opening

    if job.is_played:
        say(f"{job.label}: played before, in {job.folder}")
        job.finish(say)
        return OK
    config = job.prepare(say)
    try:
        standing, plan = make_plan_here(config)
        config = settle(config, plan, standing, find_smallest_card).config
    except PlanError as error:
        raise TargetRefused(str(error)) from error
    if found := [*find_absent(config, plan, {}), *find_obstacles(config, plan, hub_problem)]:
        raise TargetRefused("\n".join(found))
    said = tuple(filter(None, (describe_shared_gpus(plan) if plan else "",)))
    now = datetime.now().astimezone()
    order = RunOrder(config, plan, standing, said, tuple(job.arguments), now, program="telescope eval", evaluated=job.identity)
    say(f"{job.label}: in {job.folder}")
    if config.inference.remote is not None and (key := describe_key(config.inference.remote, os.environ)):
        say(key)
    with open(os.devnull, "w", encoding="utf-8") as unseen, contextlib.redirect_stdout(unseen):
        code = run_one(order)  # the table alone is this command's output
    if code == OK:
        job.finish(say)
    elif opening.is_run(job.folder):
        say("The same command again goes on where this one ended.")
    return code


def _read_rows(job: EvalJob) -> Iterator[dict[str, Any]]:
    """The last row of each eval."""
    from telescope.runlog.reader import rows

    run = RunDirectory(job.folder)
    latest = {row["eval"]: row for row in rows(run, "evals")} if run.run_json.exists() else {}
    for row in latest.values():
        yield {"target": job.target, "run_dir": str(job.folder), **{key: row[key] for key in row if key != "seq"}}


# ---- telling


def _describe_failed(row: dict[str, Any]) -> str:
    scored = (
        "" if row.get("reward_scored") is None else f"; {row['reward_scored']:.3f} is the mean of the {row['scored']} others"
    )
    return (
        f"{row['target']}: {row['failed']} samples of {row['eval']} failed, and count as not passed and with the lowest "
        f"reward{scored}. The logs in {row['run_dir']} say why"
    )


def format_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line an eval and step, under the names of its columns."""
    ks = sorted({int(k) for row in rows for k in row.get("pass_at", {})})
    head = ["target", "step", "eval", "reward", "95 %", *(f"pass@{k}" for k in ks), "prompts", "failed", "state"]
    lines = [head, *(_format_row(row, ks) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    left = (0, 2, len(head) - 1)
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _format_row(row: dict[str, Any], ks: Sequence[int]) -> list[str]:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    low, high = row.get("reward_low"), row.get("reward_high")
    step = "–" if row.get("step") is None else str(row["step"])
    return [
        *(str(row["target"]), step, row["eval"], number(row.get("reward"))),
        "–" if low is None or high is None else f"{low:.3f} … {high:.3f}",
        *(number(row.get("pass_at", {}).get(str(k))) for k in ks),
        f"{row['prompts']} x {row['samples'] if row['state'] == 'complete' else '–'}",
        *(str(row.get("failed", 0)), row["state"]),
    ]
