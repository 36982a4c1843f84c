"""`inference.vllm`: arguments that go through to vLLM's engine, those that are ours, and typos."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.config import vllm_arguments
from telescope.config.run import config_hash, dump_run, load_run
from telescope.config.sections import InferenceSettings, LoraSettings, ModelSettings
from telescope.config.vllm_arguments import FIXED, SETTING_OF, merged
from telescope.inference.vllm.options import ServerPlan, engine_arguments
from tests.config.conftest import compose_one, sentences, write

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class EngineArgs:
    model: str = "m"
    max_num_partial_prefills: int = 1
    not_a_field: ClassVar[int] = 0

    def create(self) -> None:
        inside: int = 1

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> frozenset[str]:
    """As if the vLLM installed had these arguments alone."""
    names = frozenset({"model", "max_num_partial_prefills", "kv_cache_dtype", "compilation_config", "block_size"})
    monkeypatch.setattr(vllm_arguments, "known_arguments", lambda: names)
    return names


def test_what_is_given_reaches_the_engine_and_the_hash(known: frozenset[str], tmp_path: Path) -> None:
    given = ["env=countdown", "inference.vllm.max_num_partial_prefills=2", "inference.vllm.kv_cache_dtype=fp8"]
    point = compose_one(*given, "inference.vllm.compilation_config={cudagraph_mode: PIECEWISE}")
    assert point.config is not None, point.problems
    (tmp_path / "config.json").write_text(dump_run(point.config))
    config = load_run(tmp_path / "config.json")
    plan = ServerPlan(config.model, Path("/m"), config.inference, "gpu", 8, 0, "run")
    arguments = engine_arguments(plan)
    assert (arguments["max_num_partial_prefills"], arguments["kv_cache_dtype"]) == (2, "fp8")
    assert arguments["compilation_config"] == {
        "mode": 0, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8]
    }  # fmt: skip
    assert config_hash(config) == config_hash(point.config) != config_hash(compose_one("env=countdown").config)


def test_a_file_of_ones_own_may_hold_them(known: frozenset[str], tmp_path: Path) -> None:
    write(tmp_path / "inference" / "mine.yaml", "defaults: [vllm, _self_]\nvllm:\n  block_size: 32\n")
    point = compose_one("env=countdown", "inference=mine", config_dir=tmp_path)
    assert point.config is not None, point.problems
    assert point.config.inference.vllm == {"block_size": 32}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "max_num_partial_prefils=2",
            "inference.vllm.max_num_partial_prefils=2: the engine of the installed vLLM has no such argument. Did you mean "
            "max_num_partial_prefills?",
        ),
        (
            "'kv-cache-dtype'=fp8",
            "inference.vllm.kv-cache-dtype='fp8': the engine of the installed vLLM has no such argument. Did you mean "
            "kv_cache_dtype?",
        ),
        ("zzz=1", "inference.vllm.zzz=1: the engine of the installed vLLM has no such argument."),
        (
            "max_model_len=9",
            "inference.vllm.max_model_len=9 follows from a setting of Telescope's: set inference.max_model_len instead",
        ),
        ("model=/m", "inference.vllm.model='/m' follows from a setting of Telescope's: set model.name instead"),
        (
            "logprobs_mode=raw_logprobs",
            "inference.vllm.logprobs_mode='raw_logprobs' can't be given: the trainer needs the log-probs after temperature",
        ),
        (
            "hf_token='${oc.env:HF_TOKEN}'",
            "inference.vllm.hf_token can't be given: a key must not stand in a configuration: put it into the environment "
            "variable HF_TOKEN",
        ),
    ],
)
def test_what_the_engine_does_not_take_is_told_before_anything_starts(
    known: frozenset[str], override: str, sentence: str
) -> None:
    name, _, value = override.partition("=")
    bare = name.strip("'")
    typed = f"inference.vllm.{name}={value}" if bare == name else f"inference.vllm={{{bare}: {value}}}"
    assert sentences(compose_one("env=countdown", typed, environ={"HF_TOKEN": "hf_x"})) == sentence


def test_all_mistakes_are_told_at_once(known: frozenset[str]) -> None:
    point = compose_one("env=countdown", "inference.vllm={dtype: half, seed: 3, blok_size: 8}")
    assert len(point.problems) == 3


def test_where_vllm_is_not_installed_its_names_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "known_arguments", lambda: None)
    assert compose_one("env=countdown", "inference.vllm.anything=1").config is not None
    assert "set seed instead" in sentences(compose_one("env=countdown", "inference.vllm.seed=1"))


def test_every_argument_that_follows_from_settings_is_refused_there() -> None:
    """But for `compilation_config`, of which a user may replace keys."""
    seen: set[str] = set()
    for device in ("cpu", "gpu"):
        for model in (ModelSettings(), ModelSettings(lora=LoraSettings())):
            many = InferenceSettings(
                tensor_parallel_size=2, quantization="fp8", reasoning_parser="qwen3", enable_tracing=True,
                sleep_while_training="keep_weights", max_num_batched_tokens=64,
            )  # fmt: skip
            for settings in (InferenceSettings(), many):
                seen |= engine_arguments(ServerPlan(model, Path("/m"), settings, device, 8, 0, "run")).keys()
    assert seen - SETTING_OF.keys() - FIXED.keys() == {"compilation_config"}


def test_every_setting_that_is_named_instead_exists() -> None:
    from telescope.config.run import RunConfig

    for named in SETTING_OF.values():
        for path in (word for word in named.replace(",", "").split() if "." in word):
            section, name, *_ = path.split(".")
            assert name in RunConfig.model_fields[section].annotation.model_fields, path


def test_a_mapping_of_ours_is_not_lost_and_any_other_value_replaces() -> None:
    assert merged({"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3}, "b": [2], "c": 1}) == {
        "a": {"x": 1, "y": 3}, "b": [2], "c": 1
    }  # fmt: skip
    assert merged({"a": {"x": 1}}, {"a": 3}) == {"a": 3}


def test_names_are_read_from_the_source_without_importing_it(tmp_path: Path) -> None:
    write(tmp_path / "vllm" / "__init__.py", "raise ImportError('it takes seconds')")
    write(tmp_path / "vllm" / "engine" / "arg_utils.py", SOURCE)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from telescope.config.vllm_arguments import known_arguments\n"
        "print(sorted(known_arguments()), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "['enable_log_requests', 'max_num_partial_prefills', 'model'] False\n"


REAL = """
import dataclasses, json, os
from telescope.inference.vllm.options import ServerPlan, engine_arguments, vllm_environment
os.environ.update(vllm_environment("cpu", os.environ))
from telescope.config.models import model_folder
from telescope.config.sections import InferenceSettings, ModelSettings
from vllm.engine.arg_utils import AsyncEngineArgs

given = {"long_prefill_token_threshold": 17, "compilation_config": {"debug_dump_path": "/d"}}
settings = InferenceSettings(max_model_len=64, vllm=given)
arguments = engine_arguments(ServerPlan(ModelSettings(), model_folder("tiny"), settings, "cpu", 8, 0, "run"))
config = AsyncEngineArgs(**arguments).create_engine_config()
print(json.dumps({
    "names": [field.name for field in dataclasses.fields(AsyncEngineArgs)],
    "threshold": config.scheduler_config.long_prefill_token_threshold,
    "path": str(config.compilation_config.debug_dump_path),
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_has_these_names_and_takes_what_is_given() -> None:
    said = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=110, check=True)
    told = json.loads(said.stdout.splitlines()[-1])
    assert vllm_arguments.known_arguments() == set(told["names"])
    assert not (SETTING_OF.keys() | FIXED.keys()) - set(told["names"])
    assert told["threshold"] == 17
    assert told["path"].startswith("/d")


@pytest.mark.parametrize("value", ["NaN", "1e999", "[1,[inf]]", "{a:{b:nan}}"])
def test_what_is_no_number_in_json_does_not_become_null(known: frozenset[str], value: str) -> None:
    said = sentences(compose_one(f"inference.vllm.compilation_config={value}"))
    assert said == "inference.vllm.compilation_config holds infinity or NaN, which no file of a run can: give a number"


def test_an_argument_of_vllm_does_nothing_with_another_engine() -> None:
    said = sentences(compose_one("experiment=fake", "inference.vllm.block_size=16"))
    assert said == "inference.vllm.block_size does nothing with inference.engine=fake: leave it out, or set inference=vllm"
