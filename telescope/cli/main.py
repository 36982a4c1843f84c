"""`telescope COMMAND …`: every command of the project under one name. Each is a module with `main(arguments) -> exit code`.

`python -m telescope COMMAND …` says the same where nothing is installed. Imports a command's module only when it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from telescope._launch import terminal

USAGE = 2


@dataclass(frozen=True)
class CliCommand:
    module: str
    does: str
    takes_back: bool = False
    """It makes what outlives a process, a sandbox or a folder of a model's size, of which a signal must leave nothing. What
    starts runs and servers answers signals itself."""


COMMANDS = {
    "run": CliCommand("telescope.cli.run", "train: compose, check, start and watch a run, or a sweep with -m"),
    "check": CliCommand("telescope.cli.check", "say what is wrong with a command line, and start nothing"),
    "eval": CliCommand("telescope.cli.eval", "evals of a run's checkpoints, a model or a URL; compare two results"),
    "chat": CliCommand("telescope.cli.chat", "talk to a checkpoint, a model or a URL, with an environment's tools if asked"),
    "serve": CliCommand("telescope.cli.serve", "an OpenAI-compatible server of a checkpoint, a model or adapters"),
    "plan": CliCommand("telescope.cli.plan", "what a run would be: steps, staleness, processes, memory, times"),
    "runs": CliCommand("telescope.cli.runs", "list runs, follow one's log, stop one, go on with one"),
    "show": CliCommand("telescope.cli.show.main", "what a run has learnt, why it may not, and what to try next"),
    "servers": CliCommand("telescope.cli.servers", "where a run's inference servers listen"),
    "env": CliCommand("telescope.cli.env", "try an environment; print a trajectory token by token", takes_back=True),
    "doctor": CliCommand("telescope.cli.doctor", "compare trainer and server: log-probs, weights", takes_back=True),
    "replay": CliCommand("telescope.cli.replay", "does today's core decide as the run's journal says"),
    "export": CliCommand(
        "telescope.cli.export", "a checkpoint's weights as a model that transformers and vLLM load", takes_back=True
    ),
    "migrate": CliCommand("telescope.cli.migrate", "an experiment from settings of the older Telescope, of TRL or of verl"),
    "bundle": CliCommand("telescope.cli.bundle", "wheels and an install script for hosts without a registry", takes_back=True),
    "completion": CliCommand("telescope.cli.completion", "print the shell's completion script"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command; 2 where there is no such command."""
    terminal.prepare()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        return _print_all(lambda: _print_overview(0 if given else USAGE), "", ())
    if given == ["--version"]:
        return _print_all(_print_version, " --version", ())
    name, *rest = given
    if name not in COMMANDS:
        from telescope.config.words import did_you_mean

        sys.stderr.write(f"telescope {name}: there is no such command.{did_you_mean(name, list(COMMANDS))}\n{overview()}")
        return USAGE
    return _print_all(lambda: _call(COMMANDS[name], rest), f" {name}", rest)


def _call(command: CliCommand, arguments: Sequence[str]) -> int:
    if not command.takes_back:
        return int(import_module(command.module).main(arguments))
    from telescope._launch.held_signals import raise_on_signals
    from telescope.wire.process import Interrupted, leave

    try:
        with raise_on_signals():
            return int(import_module(command.module).main(arguments))
    except Interrupted as interrupted:
        terminal.say_at_once("Interrupted.\n")
        leave(128 + interrupted.number)


def _print_all(act: Callable[[], int], name: str, arguments: Sequence[str]) -> int:
    """The exit code of a command; where what it prints is lost, another than 0, with a sentence."""
    from telescope.config.redacted_output import RedactedStream, redact_output
    from telescope.config.secrets import find_references

    code, printed = 0, None
    try:
        with redact_output(find_references(arguments)):
            printed = sys.stdout
            code = act()
    except (OSError, SystemExit) as error:
        failure = printed.failure if isinstance(printed, RedactedStream) else None
        if failure is None or (isinstance(error, OSError) and error is not failure):
            raise
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0
    if isinstance(printed, RedactedStream) and printed.failure is not None:
        return code or terminal.say_lost(f"telescope{name}", printed.failure)
    return code


def _print_overview(code: int) -> int:
    sys.stdout.write(overview())
    return code


def _print_version() -> int:
    from telescope.cli.version import describe_version

    sys.stdout.write(describe_version())
    return 0


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.does}" for name, command in COMMANDS.items()]
    more = "telescope COMMAND --help says more, telescope --version which one this is."
    return "\n".join(["usage: telescope COMMAND …", "", *lines, "", more, ""])
