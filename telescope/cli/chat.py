"""`telescope chat TARGET`, or `--url URL`: talk to a model in the terminal, or ask it one thing from a script.

A run's checkpoint, a model folder or adapters are served as `telescope serve` does, until the end of the conversation. Answers
go to stdout as they come, all else to stderr. Exit codes: 0 done, 1 refused or failed, 2 usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from telescope.cli.arguments import from_one, from_zero, whole_from_zero
from telescope.cli.command_line import parse_all
from telescope.exit_codes import DONE, ERROR

if TYPE_CHECKING:
    from telescope.cli.chat_conversation import ChatRole, ChatSession
    from telescope.cli.chat_stream import SamplingOptions, StreamingClient
    from telescope.cli.server_process import ServerProcess
    from telescope.config.run import RunConfig
    from telescope.environments.base import Chat, Turn
    from telescope.environments.template import ChatTemplate

USAGE = 2
INTERRUPTED = 128 + signal.SIGINT
URL_MAX_TOKENS = 1024
NEW = "/new"
PROMPT = "> "
DESCRIPTION = """Talk to a model in the terminal.

  telescope chat runs/my-run                          its newest checkpoint; --step 40: that of a step
  telescope chat my-model --env look_up               a model folder, with an environment's system turn and tools
  telescope chat --url http://127.0.0.1:8100/v1       a server that runs already
  echo "use 3 5 8 make 10" | telescope chat runs/my-run

Ctrl-C stops an answer, Ctrl-D (or Ctrl-C at the prompt) leaves, /new begins another dialogue."""


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    asked = _parse(arguments)
    from telescope.cli.chat_stream import AnswerRefused, ServerUnreachable
    from telescope.cli.resume import WrongOverride
    from telescope.cli.server_process import ServerProcessEnded, raise_on_signals
    from telescope.cli.start import say
    from telescope.cli.targets import TargetRefused, is_override
    from telescope.compose.load import UsageError
    from telescope.config.secrets import SecretMissing
    from telescope.wire.process import Interrupted
    from telescope.workers.loading import EnvironmentBroken

    targets = [one for one in asked.given if not is_override(one)]
    overrides = [one for one in asked.given if is_override(one)]
    if mistake := _find_mistake(asked, targets):
        say(f"telescope chat: {mistake}")
        return USAGE
    try:
        with raise_on_signals():
            return _chat(targets, asked, overrides, _read_messages(asked))
    except (UsageError, WrongOverride) as error:
        say(f"telescope chat: {error}")
        return USAGE
    except (TargetRefused, ServerProcessEnded, AnswerRefused, ServerUnreachable, EnvironmentBroken, SecretMissing) as error:
        say(f"telescope chat: {error}")
        return ERROR
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except KeyboardInterrupt:  # Python's own, between two turns
        return INTERRUPTED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="telescope chat",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("given", nargs="*", metavar="TARGET|OVERRIDE", help="whom to talk to; settings, as for telescope run")
    parser.add_argument("--step", metavar="N", help="of a run: a step with a checkpoint, `latest` (default), or 0")
    parser.add_argument("--url", metavar="URL", help="a server that runs already, e.g. http://127.0.0.1:8100/v1")
    parser.add_argument("--model", metavar="NAME", help="of a URL: the model (default: the only one that it serves)")
    parser.add_argument("--key-env", metavar="VARIABLE", help="of a URL: holds its key (default: OPENAI_API_KEY, if set)")
    parser.add_argument("--message", action="append", metavar="TEXT", help="ask this and leave; several: turn by turn")
    parser.add_argument("--env", metavar="NAME", help="an environment whose system turn and tools are used")
    parser.add_argument("--system", metavar="TEXT", help="a system turn of your own")
    parser.add_argument("--raw", action="store_true", help="no dialogue: the model goes on with each text, as base models do")
    draws = parser.add_argument_group("how answers are drawn (default: as the run samples)")
    draws.add_argument("--temperature", type=from_zero, metavar="T")
    draws.add_argument("--top-p", type=from_zero, metavar="P")
    draws.add_argument("--top-k", type=whole_from_zero, metavar="K")
    draws.add_argument("--min-p", type=from_zero, metavar="P")
    draws.add_argument("--max-tokens", type=from_one, metavar="N", help="of one answer")
    draws.add_argument("--seed", type=whole_from_zero, metavar="N")
    draws.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer; may be given several times")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder with your own presets and plug-ins")
    return parse_all(parser, arguments)


def _find_mistake(asked: argparse.Namespace, targets: Sequence[str]) -> str:
    if len(targets) + (asked.url is not None) != 1:
        return "name one whom to talk to: a run directory, a model folder or name, or --url URL; --help says more"
    if asked.url is None and (asked.model is not None or asked.key_env is not None):
        return "--model and --key-env go with --url"
    if asked.url is not None and asked.step is not None:
        return "--step names a checkpoint of a run directory, and goes without --url"
    if asked.raw and (asked.env is not None or asked.system is not None):
        return "--raw is a text and no dialogue: leave --env and --system out"
    return ""


def _read_messages(asked: argparse.Namespace) -> list[str]:
    """What is asked without a person at the terminal; empty where there is one. Raises `WrongOverride`."""
    from telescope.cli.resume import WrongOverride

    messages: list[str] = asked.message or []
    if not messages and (sys.stdin is None or not sys.stdin.isatty()):
        messages = ["" if sys.stdin is None else sys.stdin.read().rstrip("\n")]
    if any(not message.strip() for message in messages):
        raise WrongOverride("there is nothing to ask: give a text with --message, on stdin, or at a terminal")
    return messages


# ---- whom it talks to


@dataclass(frozen=True)
class Partner:
    """Who answers. `template`: of a model that is served here, whose exact tokens are known; None: messages go as text.
    `options`: how it is asked. `server`: where it is this command's own."""

    url: str
    name: str
    key: str | None
    config: RunConfig | None
    template: ChatTemplate | None
    options: SamplingOptions
    server: ServerProcess | None


@contextlib.contextmanager
def _serve_here(target: str, asked: argparse.Namespace, overrides: Sequence[str], roles: list[ChatRole]) -> Iterator[Partner]:
    """Starts a server of the target. The role is loaded first, and put into `roles`: what is wrong with it is told at once."""
    from telescope.cli.serve import describe_place
    from telescope.cli.served_model import find_model, ready_weights
    from telescope.cli.server_process import ServerProcess, plan_server
    from telescope.cli.start import say
    from telescope.cli.targets import TargetRefused
    from telescope.config.models import ModelNotFound, model_folder
    from telescope.workers.tokenizer import TokenizerError, load_template

    own = argparse.Namespace(**{**vars(asked), "host": "127.0.0.1", "port": 0, "key_env": None})
    model = find_model(target, own, overrides)
    roles += _load_role(asked, model.config)
    if model.remark:
        say(model.remark)
    plan, options = plan_server(model), make_options(asked, model.config, roles)
    with ready_weights(model, say) as ready:
        settings = ready.config.model
        try:
            template = None if asked.raw else load_template(settings, model_folder(settings.name))
        except ModelNotFound as error:
            raise TargetRefused(str(error)) from error
        except TokenizerError as error:
            raise TargetRefused(f"{error}; or have it go on with a text: --raw") from error
        say(f"starting a server of {model.label} on {describe_place(plan.gpus)}")
        with ServerProcess(ready, plan) as server:
            yield Partner(server.wait_until_ready(), ready.name, None, ready.config, template, options, server)


@contextlib.contextmanager
def _reach_url(asked: argparse.Namespace, overrides: Sequence[str], roles: list[ChatRole]) -> Iterator[Partner]:
    import os

    from telescope.cli.resume import WrongOverride
    from telescope.cli.served_model import choose_environment
    from telescope.cli.start import say
    from telescope.cli.targets import choose_key, compose_untrained, describe_key
    from telescope.config.secrets import make_reference
    from telescope.config.sections import RemoteServer, find_url_mistake

    if not asked.url.startswith(("http://", "https://")):
        raise WrongOverride(f"--url {asked.url} is not an address such as http://127.0.0.1:8100/v1")
    if mistake := find_url_mistake(asked.url):
        raise WrongOverride(f"--url {mistake}")
    variable = choose_key(asked.url, asked.key_env)
    reference = None if variable is None else make_reference(variable)
    if told := describe_key(RemoteServer(url=asked.url, model="any", api_key=reference), os.environ):
        say(told)
    if asked.env is not None:
        fixed = ["model=tiny", *choose_environment(asked.env)]
        roles += _load_role(asked, compose_untrained([*fixed, *overrides], asked.config_dir))
    key = None if variable is None else os.environ[variable]
    yield Partner(asked.url, asked.model or "", key, None, None, make_options(asked, None, roles), None)


def _load_role(asked: argparse.Namespace, config: RunConfig) -> list[ChatRole]:
    """The environment of `--env`, as a worker loads it. Raises `EnvironmentBroken`."""
    from telescope.cli.chat_conversation import ChatRole
    from telescope.workers.loading import load_environments

    return [] if asked.env is None else [ChatRole(load_environments(config)[asked.env])]


# ---- the conversation


def _chat(targets: Sequence[str], asked: argparse.Namespace, overrides: Sequence[str], messages: Sequence[str]) -> int:
    roles: list[ChatRole] = []
    with ExitStack() as opened:
        reached = _serve_here(targets[0], asked, overrides, roles) if targets else _reach_url(asked, overrides, roles)
        partner = opened.enter_context(reached)
        opened.enter_context(_hear_interrupts())
        runner = opened.enter_context(asyncio.Runner())
        around = AsyncExitStack()
        opened.callback(lambda: runner.run(around.aclose()))
        screen = Screen()
        conversation, client, name = runner.run(_begin(partner, asked, roles, screen, around))
        answering = _Answering(runner, conversation, client, screen, partner.server)
        return answering.ask_all(messages) if messages else answering.converse(name, roles)


async def _begin(
    partner: Partner, asked: argparse.Namespace, roles: Sequence[ChatRole], screen: Screen, around: AsyncExitStack
) -> tuple[ChatSession, StreamingClient, str]:
    """(conversation, its client, the model's name). What must be closed again goes into `around`. Raises `ServerUnreachable`,
    `AnswerRefused`, `EnvironmentBroken` and `WrongOverride`."""
    from telescope.cli.chat_conversation import ChatConversation, RawConversation
    from telescope.cli.chat_stream import StreamingClient
    from telescope.environments.graders.pool import open_graders
    from telescope.workers.loading import set_up, tear_down

    role = roles[0] if roles else None
    client = StreamingClient(partner.url, partner.key, screen.show)
    around.push_async_callback(client.close)
    if partner.config is None:
        partner = await _ask_about_model(partner, client, asked)
    name = partner.name
    if asked.raw:
        return RawConversation(client, name, partner.options), client, name
    if role is not None:
        await around.enter_async_context(open_graders())  # before the environment's own beginning, as in a worker
        await set_up(role.loaded)
        around.push_async_callback(tear_down, role.loaded)
    system: Sequence[Turn] = () if role is None else role.system
    if asked.system is not None:
        system = ({"role": "system", "content": asked.system},)
    open_chat = _choose_chat(partner, client, name)
    conversation = ChatConversation(open_chat, system, role, screen.tell, lambda: client.is_stopped)
    around.push_async_callback(conversation.close)
    return conversation, client, name


async def _ask_about_model(partner: Partner, client: StreamingClient, asked: argparse.Namespace) -> Partner:
    """The same with its model's name, and answers that are no longer than half of the room that the server says it has."""
    from telescope.cli.chat_stream import AnswerRefused
    from telescope.cli.resume import WrongOverride

    try:
        served = await client.list_models()
    except AnswerRefused:
        if partner.name:  # not every server has a list
            return partner
        raise
    if not partner.name and len(served) != 1:
        raise WrongOverride(f"{partner.url} serves {', '.join(served) or 'no model'}: --model NAME says which one is asked")
    name = partner.name or next(iter(served))
    room, options = served.get(name), partner.options
    if asked.max_tokens is None and isinstance(room, int):
        options = replace(options, max_tokens=min(options.max_tokens, max(1, room // 2)))
    return replace(partner, name=name, options=options)


def _choose_chat(partner: Partner, client: StreamingClient, name: str) -> Callable[[], Chat]:
    """What makes an empty dialogue."""
    from telescope.cli.chat_stream import StreamedText, StreamedTokens
    from telescope.environments.chat import TokenChat
    from telescope.records import Sampling
    from telescope.workers.text_chat import TextChat

    template, config, options = partner.template, partner.config, partner.options
    if template is None or config is None:
        return lambda: TextChat(
            StreamedText(client, name, options),
            lambda turn, most: Sampling(options.temperature or 0.0, min(most or options.max_tokens, options.max_tokens), 0),
        )
    longest = config.inference.max_model_len - options.max_tokens
    sampler = StreamedTokens(client, name, options, list(template.end_texts))
    return lambda: TokenChat(template, sampler, longest, max_tokens=options.max_tokens)


def make_options(asked: argparse.Namespace, config: RunConfig | None, roles: Sequence[ChatRole]) -> SamplingOptions:
    """As the run samples, where there is one, and as the command line says. An answer has at most half of a short context, so
    that a dialogue has room. Raises `WrongOverride`."""
    from telescope.cli.chat_stream import SamplingOptions
    from telescope.cli.resume import WrongOverride
    from telescope.workers.play import PlayLimits

    stop = tuple(asked.stop or ())
    if config is None:
        drawn: dict[str, Any] = {"max_tokens": URL_MAX_TOKENS}
    else:
        limits, room = PlayLimits.from_config(config), config.inference.max_model_len
        for role in roles:
            limits = limits.of(role.loaded)
        drawn = {"max_tokens": min(limits.max_tokens, room // 2), "temperature": limits.temperature}
        support = limits.support
        drawn |= {"top_p": support.top_p, "top_k": support.top_k or None, "min_p": support.min_p}
        stop = stop or limits.stop
        if asked.max_tokens is not None and asked.max_tokens >= room:
            raise WrongOverride(
                f"--max-tokens {asked.max_tokens} leaves no room for a prompt: inference.max_model_len={room} holds both"
            )
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    return SamplingOptions(**{**drawn, **given}, stop=stop)


class Screen:
    """Answers go to stdout as they come; what is told beside them goes to stderr, in lines of its own."""

    def __init__(self) -> None:
        self._within_line = False
        self._is_empty = True

    def begin_answer(self) -> None:
        self._is_empty = True

    def end_answer(self) -> None:
        """Each answer ends its line, an empty one too."""
        if self._within_line or self._is_empty:
            self.show("\n")

    def show(self, piece: str) -> None:
        self._is_empty = False
        sys.stdout.write(piece)
        sys.stdout.flush()
        self._within_line = not piece.endswith("\n")

    def tell(self, lines: str) -> None:
        self.end_line()
        sys.stderr.write(lines)
        sys.stderr.flush()

    def end_line(self) -> None:
        if self._within_line:
            self.show("\n")


class _Answering:
    """Turn by turn, on the loop of one runner; between turns it stands still."""

    def __init__(
        self,
        runner: asyncio.Runner,
        conversation: ChatSession,
        client: StreamingClient,
        screen: Screen,
        server: ServerProcess | None,
    ) -> None:
        self._runner, self._conversation, self._client = runner, conversation, client
        self._screen, self._server = screen, server
        self._interrupts = 0
        """Signals since the turn began."""

    def ask_all(self, messages: Sequence[str]) -> int:
        """Each as a turn, without a person. The exit code."""
        for message in messages:
            if sentence := self._answer(message):
                self._screen.tell(f"telescope chat: {sentence}\n")
                return ERROR
            if self._interrupts:
                return INTERRUPTED
        return DONE

    def converse(self, name: str, roles: Sequence[ChatRole]) -> int:
        """With a person, until he or she leaves. The exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 -- `input` then edits lines and remembers them
        tell = self._screen.tell
        tell(f"{name} listens. Ctrl-C stops an answer, Ctrl-D leaves, {NEW} begins another dialogue.\n")
        for role in roles:
            tell(f"{_describe_role(role)}\n")
        while True:
            try:
                text = input(PROMPT)
            except (EOFError, KeyboardInterrupt):
                tell("\n")
                return DONE
            if text.strip() == NEW:
                self._runner.run(self._conversation.forget())
                tell("A new dialogue.\n")
            elif text.strip():
                sentence = self._answer(text) or ("(stopped)" if self._interrupts else "")
                if sentence:
                    tell(f"{sentence}\n")
                if self._interrupts > 1:
                    return INTERRUPTED

    def _answer(self, text: str) -> str:
        """Why there is no whole answer; empty where there is one. Raises `ServerProcessEnded` and `ServerUnreachable`."""
        from telescope.cli.chat_stream import AnswerRefused, AnswerStopped, ServerUnreachable
        from telescope.environments.failures import ContextFull, InfrastructureError, PolicyError
        from telescope.environments.template import TemplateError

        self._interrupts = 0
        self._screen.begin_answer()
        try:
            self._runner.run(self._take_turn(text))
            self._screen.end_answer()
        except ContextFull as error:
            return f"{error}. {NEW} begins another dialogue"
        except AnswerStopped:
            return ""
        except (AnswerRefused, InfrastructureError, PolicyError, TemplateError) as error:
            return str(error)
        except ServerUnreachable:
            if self._server is not None:
                self._server.refuse_ended()
            raise
        finally:
            self._screen.end_line()
        return ""

    async def _take_turn(self, text: str) -> None:
        """Ctrl-C stops the answer that comes, or what a tool does; once more cancels all."""
        loop = asyncio.get_running_loop()
        turn = asyncio.create_task(self._conversation.answer(text))

        def stop() -> None:
            self._interrupts += 1
            if self._interrupts > 1 or not self._client.stop():
                turn.cancel()

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            await asyncio.wait({turn})
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if not turn.cancelled():
            turn.result()


def _describe_role(role: ChatRole) -> str:
    tools = role.tools
    names = ", ".join(getattr(tool, "__name__", str(tool)) for tool in tools.tools) if tools is not None else ""
    parts = [f"{role.loaded.label}: {'its system turn comes first' if role.system else 'it has no system turn'}"]
    if tools is not None:
        parts.append(f"its tools are run{f' ({names})' if names else ''}")
    return f"{'; '.join(parts)}. One of its prompts: {role.question}"


@contextlib.contextmanager
def _hear_interrupts() -> Iterator[None]:
    """Within, Ctrl-C is Python's own `KeyboardInterrupt`, which `input` and the event loop know."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
