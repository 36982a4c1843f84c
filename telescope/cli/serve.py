"""`telescope serve TARGET [overrides]`: an OpenAI-compatible server of a run's checkpoint, a model folder or LoRA adapters.

In the foreground, until Ctrl-C. Its URL and the line to type go to stdout, all else to stderr. Exit codes: 0 served until
it was told to stop, 1 refused or failed, 2 usage, 130 and 143 interrupted before it served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from telescope.cli.command_line import parse_all
from telescope.exit_codes import DONE, ERROR

USAGE = 2
NO_TEMPLATE = (
    "The model has no chat template (a base model?): only /v1/completions answers, unless model.chat_template gives one."
)
DESCRIPTION = """Serve a model over HTTP, as OpenAI's API.

  telescope serve runs/my-run                   its newest checkpoint
  telescope serve runs/my-run --step 40         that of a step; 0: the model it began with
  telescope serve my-model                      a model: a Hugging Face folder, LoRA adapters, a name

It listens on this machine alone, unless --host and --key-env say otherwise. A run may go on meanwhile."""


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    asked = _parse(arguments)
    from telescope._launch.held_signals import raise_on_signals
    from telescope._launch.terminal import say_at_once
    from telescope.cli.resume import WrongOverride
    from telescope.cli.server_process import ServerProcessEnded
    from telescope.cli.start import say
    from telescope.cli.targets import TargetRefused, is_override
    from telescope.compose.load import UsageError
    from telescope.wire.process import Interrupted

    targets = [one for one in asked.given if not is_override(one)]
    overrides = [one for one in asked.given if is_override(one)]
    if len(targets) != 1:
        say("telescope serve: name what is to be served: one run directory, model folder or name; --help says more")
        return USAGE
    try:
        with raise_on_signals():
            return _serve(targets[0], asked, overrides)
    except (UsageError, WrongOverride) as error:
        say(f"telescope serve: {error}")
        return USAGE
    except (TargetRefused, ServerProcessEnded) as error:
        say(f"telescope serve: {error}")
        return ERROR
    except Interrupted as interrupted:
        say_at_once("Stopped before it served.\n")
        return 128 + interrupted.number


def _serve(target: str, asked: argparse.Namespace, overrides: Sequence[str]) -> int:
    from telescope._launch.terminal import say_at_once
    from telescope.cli.served_model import find_model, ready_weights
    from telescope.cli.server_process import ServerProcess, plan_server, write_curl
    from telescope.cli.start import say

    model = find_model(target, asked, overrides)
    if model.remark:
        say(model.remark)
    plan = plan_server(model)
    with ready_weights(model, say) as ready:
        from telescope.config.model_facts import has_chat_template
        from telescope.config.models import model_folder

        own = ready.config.model
        chat = own.chat_template is not None or has_chat_template(own.name, model_folder(own.name))
        say(f"starting a server of {model.label} on {describe_place(plan.gpus)}")
        with ServerProcess(ready, plan) as server:
            url = server.wait_until_ready()
            key = "" if asked.key_env is None else f" --key-env {asked.key_env}"
            lines = [f"{url}  {ready.name}", "", write_curl(url, ready.name, asked.key_env, chat=chat)]
            lines.append(f"telescope chat --url {url}{key}{'' if chat else ' --raw'}")

            def announce() -> None:
                sys.stdout.write("\n".join(lines) + "\n")
                sys.stdout.flush()
                if not chat:
                    say(NO_TEMPLATE)
                say("Ctrl-C ends it.")

            server.wait_until_ended(announce)
            say_at_once("Stopping.\n")  # whatever the terminal does, the server and its GPU go
    return DONE


def describe_place(gpus: Sequence[str]) -> str:
    """`GPU 0`, `the CPU`"""
    if not gpus:
        return "the CPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(gpus)}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="telescope serve",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("given", nargs="*", metavar="TARGET|OVERRIDE", help="what to serve; settings, as for telescope run")
    parser.add_argument("--step", metavar="N", help="of a run: a step with a checkpoint, `latest` (default), or 0")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where it listens (127.0.0.1)")
    parser.add_argument("--port", type=port, metavar="N", help="its port; 0: any free one (8100, or the next free one)")
    parser.add_argument("--key-env", metavar="VARIABLE", help="holds the key that requests must bring (default: none)")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder with your own presets and plug-ins")
    parser.set_defaults(env=None)
    return parse_all(parser, arguments)


def port(text: str) -> int:
    """For argparse."""
    if text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
