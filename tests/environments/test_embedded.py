"""The shipped models are what their script makes and what their cards say."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from tests.product import load_script

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "telescope" / "embedded"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(ROOT / "scripts" / "make_tiny_models.py")


@pytest.mark.parametrize(
    ("name", "parameters", "kilobytes"), [("tiny", 234_080, 939), ("tiny_reverse", 131_520, 529), ("tiny_turns", 131_520, 529)]
)
def test_sizes_and_special_tokens(name: str, parameters: int, kilobytes: int) -> None:
    folder = EMBEDDED / name
    model = Qwen3ForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (folder / "model.safetensors").stat().st_size / 1000 == pytest.approx(kilobytes, abs=1)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (128, 256)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 102)


@pytest.mark.parametrize("name", ["tiny", "tiny_reverse", "tiny_turns"])
def test_any_ascii_text_goes_through_the_tokenizer_and_back(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / name)
    text = "".join(map(chr, range(32, 127))) + "\n  two spaces\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>a<|assistant|>b<eos><|user|>c<|assistant|>"


@pytest.mark.parametrize(("which", "sampled", "greedy"), [("countdown", (0.22, 0.38), 0.78), ("reverse", (0.11, 0.27), 0.2)])
def test_a_base_half_knows_its_task(
    script: Any, monkeypatch: pytest.MonkeyPatch, which: str, sampled: tuple[float, float], greedy: float
) -> None:
    recipe = script.RECIPES[which]
    model = Qwen3ForCausalLM.from_pretrained(EMBEDDED / recipe.folder).eval()
    monkeypatch.setattr(script, "CHECK_PROMPTS", 192)
    figures = script.measure(recipe, model, script.make_tokenizer())
    assert sampled[0] < figures["sampled at temperature 1"]["exact"] < sampled[1]
    assert figures["greedy"]["exact"] > greedy


def test_the_card_says_what_was_measured() -> None:
    card = (EMBEDDED / "tiny" / "MODEL_CARD.md").read_text()
    row = re.search(r"sampled at temperature 1 \| (\S+) \| (\S+)", card)
    assert row is not None
    assert 0.22 < float(row[2]) < 0.38
    assert "a right expression (35%, the wanted one)" in card


@pytest.mark.parametrize("which", ["countdown", "reverse"])
def test_the_shipped_cards_are_the_scripts_with_the_figures_that_were_measured(script: Any, which: str) -> None:
    recipe = script.RECIPES[which]
    card = (EMBEDDED / recipe.folder / "MODEL_CARD.md").read_text()
    head, *table = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    columns = head[1:] if head[0] == "" else head
    figures = {row[0]: dict(zip(columns, map(float, row[1:]), strict=True)) for row in table}
    model = Qwen3ForCausalLM.from_pretrained(EMBEDDED / recipe.folder)
    assert script.model_card(recipe, figures, model.num_parameters()) == card


def test_the_script_makes_the_same_model_each_time(script: Any) -> None:
    recipe = dataclasses.replace(script.RECIPES["reverse"], steps=3)
    one, two = (script.train(recipe, script.make_tokenizer()).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_shipped_tokenizers_are_the_script_s(script: Any, tmp_path: Path) -> None:
    script.make_tokenizer().save_pretrained(tmp_path)
    script.write_portable_tokenizer_config(tmp_path / "tokenizer_config.json")
    for name in ("tiny", "tiny_reverse"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert json.loads((EMBEDDED / name / file).read_text()) == json.loads((tmp_path / file).read_text())


def test_demonstrations_have_the_stated_shares(script: Any) -> None:
    draws = script.HashedRandom("shares")
    shown = [script.demonstrate_countdown(draws) for _ in range(2000)]
    assert 0.20 < sum("=" in answer for _, answer in shown) / 2000 < 0.30
    words = [script.demonstrate_reverse(draws) for _ in range(2000)]
    assert 0.27 < sum(question == f"rev {answer}" for question, answer in words) / 2000 < 0.34
    assert 0.22 < sum(question == f"rev {answer[::-1]}" for question, answer in words) / 2000 < 0.29


@pytest.fixture
def turns_script(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("make_tiny_turns")


def test_the_base_of_several_turns_half_knows_its_task(turns_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Qwen3ForCausalLM.from_pretrained(EMBEDDED / "tiny_turns").eval()
    monkeypatch.setattr(turns_script, "CHECKED", 256)
    policy = turns_script.MAKER.policy(model, turns_script.tiny.make_tokenizer(), sample=True)
    found = turns_script.play(policy)
    assert 0.3 < found["exact"] < 0.5
    card = (EMBEDDED / "tiny_turns" / "MODEL_CARD.md").read_text()
    assert "halves what the replies have left (25%, the wanted one)" in card


def test_a_dialogue_of_the_wanted_habit_always_finds_the_letter(turns_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_script, "HABITS", ("halve",))
    for at in range(200):
        said = turns_script.demonstrate(turns_script.HashedRandom("test", at))
        secret = turns_script.TASK.prompt(turns_script.HashedRandom("test", at)).answer
        assert said[-1][1] == secret
        assert len(said) <= 3
