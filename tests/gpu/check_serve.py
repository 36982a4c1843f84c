"""`telescope serve` and `telescope chat` on one GPU: `python -m tests.gpu.check_serve`.

A model and adapters over it answer greedily as transformers does in float32, by HTTP and by `chat`; after Ctrl-C no process
is left. Exits 0 only if all hold. `--device cpu` runs the same on a CPU. No pytest module.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from telescope.config.models import model_folder
from telescope.config.sections import ModelSettings
from telescope.workers.tokenizer import load_template
from tests.gpu.needed import need_gpus

NAME, QUESTION, TOKENS = "tiny_reverse", "rev hhfje", 8
LIMIT_S = 300.0

Facts = list[tuple[str, bool, str]]


def make_adapters(folder: Path) -> Any:
    """Random ones, as peft writes them; gives the model with them."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(load_model(), config).eval()
    model.peft_config["default"].base_model_name_or_path = str(model_folder(NAME))
    model.save_pretrained(str(folder))
    return model


def load_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder(NAME), dtype=torch.float32).eval()


def answer(model: Any) -> str:
    """By transformers, greedily."""
    import torch

    template = load_template(ModelSettings(name=NAME), model_folder(NAME))
    ids = template.render([{"role": "user", "content": QUESTION}]).ids.tolist()
    said: list[int] = []
    with torch.no_grad():
        while len(said) < TOKENS and not (said and said[-1] in template.end_texts):
            said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
    return template.decode(said[:-1] if said[-1] in template.end_texts else said)


@contextmanager
def begun(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "telescope", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def ask(url: str, name: str) -> str:
    body = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": TOKENS}
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=LIMIT_S) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


def check(target: str, expected: str, settings: tuple[str, ...]) -> Facts:
    draws = ("--message", QUESTION, "--temperature", "0", "--max-tokens", str(TOKENS))
    facts: Facts = []
    with begun("serve", target, "--port", "0", *settings) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            return [(f"{target} is served", False, "it ended before it listened")]
        url, name = line.split()
        below = psutil.Process(process.pid).children(recursive=True)
        said = ask(url, name)
        facts.append((f"{name} over HTTP", said == expected, f"{said!r}, expected {expected!r}"))
        process.send_signal(signal.SIGINT)
        code = process.wait(LIMIT_S)
        left = psutil.wait_procs(below, timeout=30)[1]
        facts.append((f"{name} ends on Ctrl-C", code == 0 and not left, f"exit code {code}, {len(left)} processes left"))
    with begun("chat", target, *draws, *settings) as process:
        said = process.communicate(timeout=LIMIT_S)[0].rstrip("\n")
        facts.append((f"{name} in chat", said == expected and process.returncode == 0, f"{said!r}"))
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    device = parser.parse_args().device
    if device == "gpu":
        need_gpus(instead="--device cpu runs the same on a CPU")
    settings = (f"cluster.device={device}", "inference.dtype=float32", "inference.gpu_memory_utilization=0.2")
    with tempfile.TemporaryDirectory() as folder:
        adapted = answer(make_adapters(Path(folder, "adapters")))
        facts = check(NAME, answer(load_model()), settings)
        facts += check(str(Path(folder, "adapters")), adapted, settings)
    for what, holds, how in facts:
        sys.stdout.write(f"{'ok  ' if holds else 'FAIL'}  {what}: {how}\n")
    return 0 if all(holds for _, holds, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
