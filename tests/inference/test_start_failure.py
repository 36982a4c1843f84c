"""What a server says of an engine that did not start."""

from __future__ import annotations

import pytest

from telescope.inference.vllm.outputs import start_failure

VLLM = "Engine core initialization failed. See root cause above. Failed core proc(s): "


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by SIGKILL"), (1, "ended with exit code 1")])
def test_how_the_engines_process_ended_is_told(code: int, how: str) -> None:
    assert start_failure(f"{VLLM}{{'EngineCore': {code}}}") == (
        f"the engine's process ended during its start (EngineCore {how}); its own words are further up in this log"
    )


def test_a_start_that_failed_before_any_process_ended_points_to_the_log() -> None:
    assert start_failure(f"{VLLM}{{}}") == "the engine's process could not start; its own words are further up in this log"


def test_other_words_of_vllm_are_passed_on_in_one_line() -> None:
    assert start_failure("no room\nfor it") == "the engine did not start: no room"
    assert start_failure("") == "the engine did not start: vLLM does not say why"
