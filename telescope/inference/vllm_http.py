"""vLLM's HTTP application built around our engine. The one place that knows what moved between vLLM 0.25 and 0.32.

No import of vLLM at import time; every function imports what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telescope.config.parts import InferenceSettings, ModelSettings


def unknown_parsers(inference: InferenceSettings) -> str:
    """A sentence if vLLM has no parser of a name that the settings give; else empty. Imports vLLM where they give one."""
    for setting, given in (
        ("tool_call_parser", inference.tool_call_parser),
        ("reasoning_parser", inference.reasoning_parser),
    ):
        if given is None:
            continue
        known = _tool_parsers() if setting == "tool_call_parser" else _reasoning_parsers()
        if given not in known:
            return f"inference.{setting}={given} is no parser of this vLLM, which has {', '.join(sorted(known))}"
    return ""


async def application(client: Any, model: ModelSettings, inference: InferenceSettings, api_key: str | None) -> Any:
    """vLLM's FastAPI application over an AsyncLLM."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.25
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--disable-fastapi-docs"])
    arguments.model = client.model_config.model
    arguments.served_model_name = [model.name]
    arguments.chat_template = model.chat_template
    arguments.api_key = [api_key] if api_key else None
    arguments.tool_call_parser = inference.tool_call_parser
    arguments.enable_auto_tool_choice = inference.tool_call_parser is not None
    if inference.reasoning_parser:
        arguments.reasoning_parser = inference.reasoning_parser
        arguments.structured_outputs_config.reasoning_parser = inference.reasoning_parser
    tasks = await client.get_supported_tasks()
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)
    return app


def _tool_parsers() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def _reasoning_parsers() -> list[str]:
    from vllm.reasoning import ReasoningParserManager

    return list(ReasoningParserManager.list_registered())
