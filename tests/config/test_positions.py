"""A model is not asked to serve longer texts than it was made for: that is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telescope.cli.check import main
from telescope.config.models import positions

LONG = ["inference.max_model_len=512", "trainer.seq_len=512"]


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": None}, 256),
        ({"max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 256, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, None),
        ({"max_position_embeddings": 256, "model_max_length": 1024}, None),
        ({"max_position_embeddings": "many"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_positions_are_read_where_they_are_plain(given: object, most: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert positions(str(tmp_path)) == most


def test_a_length_beyond_the_positions_is_refused_with_both_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    assert main(["model=tiny", *LONG]) == 1
    assert (
        "inference.max_model_len=512 is above the 256 positions of model.name=tiny, and vLLM serves no model beyond them: set "
        "inference.max_model_len=256, or name another model"
    ) in capsys.readouterr().err
    assert main(["model=tiny", "inference=fake", "backend=fake", *LONG]) == 0
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert main(["model=tiny", *LONG]) == 0
