"""Tool environments of the other design (compat.py): functions in `tools`, calls in XML tags or as `name(argument=1)`.

A call that cannot be read is answered with what is wrong and counted as an error; it is no final answer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from telescope.environments.compat import Messages, MultiTurnEnvironment, RolloutState, Sample
from telescope.environments.failures import InfrastructureError, PolicyError
from telescope.environments.hidden import told
from telescope.environments.off_loop import TimeLimit, called
from telescope.environments.tools.calls import CallFormat, Malformed, how_to_call, parse_calls
from telescope.environments.tools.schema import BadArguments, as_text, tool_of

_FORMATS: dict[str, CallFormat] = {"xml": "json", "function": "python"}


@dataclass
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw_text: str = ""
    error: str = ""
    """Why it cannot be read; empty for a call."""


@dataclass
class ToolResult:
    tool_name: str
    result: str
    success: bool
    error: str | None = None


class ToolEnvironment(MultiTurnEnvironment):
    """Subclasses give `load_dataset` and `compute_reward(state, eos_token="")`, and may override what is public here."""

    def __init__(
        self,
        *,
        tools: list[Callable[..., Any]] | None = None,
        max_turns: int = 10,
        tool_call_format: str = "xml",
        include_tool_schemas_in_prompt: bool = True,
        error_formatter: Callable[[Exception], str] | None = None,
        tool_timeout_s: float = 10.0,
        system_prompt: str | None = None,
        instruction_prompt: str | None = None,
    ) -> None:
        """`tool_timeout_s`: seconds one call may take; afterwards the policy is told that it took too long."""
        super().__init__(max_turns=max_turns, system_prompt=system_prompt, instruction_prompt=instruction_prompt)
        if tool_call_format not in _FORMATS:
            raise ValueError(f"tool_call_format={tool_call_format!r} must be xml or function")
        self.tools = tools or []
        self.tool_timeout_s = tool_timeout_s
        self.tool_call_format = tool_call_format
        self.error_formatter = error_formatter or _formatted
        self.tool_map = {function.__name__: function for function in self.tools}
        self._tools = {function.__name__: tool_of(function) for function in self.tools}
        self.tool_schemas = [dict(tool.schema) for tool in self._tools.values()]
        if include_tool_schemas_in_prompt and self.tools:
            self.system_prompt = "\n\n".join(part for part in (system_prompt, self._tools_in_words()) if part)

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        """Calls in order; what was meant as one and cannot be read has an `error`."""
        found = []
        for call in parse_calls(completion, _FORMATS[self.tool_call_format]).calls:
            if isinstance(call, Malformed):
                found.append(ToolCall("", raw_text=call.text, error=call.reason))
            else:
                found.append(ToolCall(call.name, dict(call.arguments), json.dumps(dict(call.arguments), default=str)))
        return found

    def is_final_answer(self, completion: str, state: RolloutState) -> bool:
        return not self.parse_tool_calls(completion)

    async def execute_tool(self, tool_call: ToolCall) -> ToolResult:
        """Never raises but for failures of the infrastructure and those that a tool blames on the policy."""
        if tool_call.error:
            return ToolResult(tool_call.name, tool_call.error, success=False, error="malformed_call")
        tool = self._tools.get(tool_call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(tool_call.name, f"there is no such tool; there are {known}", success=False, error="unknown_tool")
        try:
            run = functools.partial(tool.function, **tool.arguments(tool_call.arguments))
            result = await called(run, limit_s=self.tool_timeout_s)
        except BadArguments as error:
            return ToolResult(tool_call.name, str(error), success=False, error="argument_error")
        except TimeLimit:
            said = f"it took longer than {self.tool_timeout_s:g} s"
            return ToolResult(tool_call.name, said, success=False, error="timeout")
        except (InfrastructureError, PolicyError):
            raise
        except Exception as error:  # noqa: BLE001 the tool's own; the policy reads of it
            return ToolResult(tool_call.name, told(self.error_formatter(error)), success=False, error=type(error).__name__)
        return ToolResult(tool_call.name, as_text(result), success=True)

    def format_tool_result(self, result: ToolResult) -> str:
        return f"[{result.tool_name}] {'' if result.success else 'Error: '}{result.result}"

    def format_multiple_tool_results(self, results: list[ToolResult]) -> str:
        return "\n".join(self.format_tool_result(result) for result in results)

    def create_initial_state(self, sample: Sample) -> RolloutState:
        state = super().create_initial_state(sample)
        state.custom |= {"tool_calls": [], "tool_results": [], "tools_by_name": {}}
        return state

    async def env_response(self, messages: Messages, state: RolloutState) -> Messages:
        completion = str(messages[-1]["content"])
        if self.is_final_answer(completion, state):
            return []
        results = []
        for call in self.parse_tool_calls(completion):
            result = await self.execute_tool(call)
            results.append(result)
            state.custom["tool_calls"].append({"name": call.name, "arguments": call.arguments, "raw": call.raw_text})
            state.custom["tool_results"].append(vars(result) | {"name": result.tool_name})
            if call.name in self._tools:
                by_name = state.custom["tools_by_name"]
                by_name[call.name] = by_name.get(call.name, 0) + 1
        return [{"role": "user", "content": self.format_multiple_tool_results(results)}] if results else []

    def get_tool_metrics(self, state: RolloutState) -> dict[str, float]:
        results = state.custom["tool_results"]
        successes = sum(result["success"] for result in results)
        return {
            "total_tool_calls": float(len(results)),
            "tool_success_count": float(successes),
            "tool_error_count": float(len(results) - successes),
            "tool_success_rate": successes / len(results) if results else 0.0,
            "unique_tools_used": float(len(state.custom["tools_by_name"])),
            **{f"{name}_calls": float(state.custom["tools_by_name"].get(name, 0)) for name in self._tools},
        }

    def _tools_in_words(self) -> str:
        listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in self.tool_schemas)
        return (
            f"You may call these tools:\n{listed}\n\nTo call one, {how_to_call(_FORMATS[self.tool_call_format])}. "
            "An answer without a call is your final one."
        )


def _formatted(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
