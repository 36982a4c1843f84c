"""Options of the FSDP backend that do not go together are refused, with the remedy in the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from telescope.backends.base import BackendSettings
from telescope.backends.fsdp import FSDP
from telescope.backends.megatron import Megatron
from telescope.config.models import ModelCounts, read_counts
from tests.config.conftest import compose_one, sentences


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"reshard_after_forward": 1},
            "backend.reshard_after_forward=1 is not a group of ranks: set true, false, or 2 or more",
        ),
        ({"offload": "optimizer", "optimizer": "sgd"}, "which has no moments: leave it out"),
        (
            {"offload": "parameters", "optimizer": "muon"},
            "backend.optimizer=muon does: set offload=optimizer, or optimizer=adamw",
        ),
        ({"offload": "parameters", "optimizer": "adamw_8bit"}, "set offload=optimizer, or optimizer=adamw"),
        (
            {"gradient_checkpointing": False, "checkpointed_layers": 2},
            "backend.checkpointed_layers=2 says .* none does: set gradient_checkpointing=full, or leave it out",
        ),
        ({"checkpointed_layers": 0}, "checkpointed_layers\n.*greater than or equal to 1"),
        ({"compile": True, "attention": "flex"}, "attention=flex is compiled itself: set flash or sdpa"),
    ],
)
def test_options_that_do_not_go_together(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        FSDP(**settings)


@pytest.mark.parametrize(
    ("settings", "run", "sentence"),
    [
        ({"replicas": 3}, {"ranks": 4}, "backend.replicas=3 must divide cluster.trainer_num_workers=4: .* set .*_workers=6"),
        ({"reshard_after_forward": 3}, {"ranks": 8}, "=3 must divide the 8 ranks of a replica and be fewer"),
        ({"reshard_after_forward": 4, "replicas": 2}, {"ranks": 8}, "=4 must divide the 4 ranks of a replica and be fewer"),
        ({"optimizer": "muon"}, {"adapters": True}, "set optimizer=adamw, or model.lora=null"),
        ({"offload": "optimizer"}, {"on_cpu": True}, "cluster.device=cpu has none: leave it out"),
    ],
)
def test_options_that_do_not_go_with_the_run(settings: dict[str, object], run: dict[str, object], sentence: str) -> None:
    import re

    found = list(FSDP(**settings).run_errors(**{"ranks": 1, "adapters": False, "on_cpu": False, **run}))  # type: ignore[arg-type]
    assert len(found) == 1
    assert re.search(sentence, found[0][1]), found[0][1]
    assert all(path.startswith(("backend.", "cluster.", "model.")) for path in found[0][0])


def test_options_that_go_together() -> None:
    assert not list(FSDP(replicas=2, reshard_after_forward=2).run_errors(ranks=8, adapters=False, on_cpu=True))
    FSDP(offload="optimizer", optimizer="adamw_8bit", gradient_checkpointing="selective")
    FSDP(compile=True, gradient_checkpointing="full")
    FSDP(compile=True, gradient_checkpointing="selective", checkpointed_layers=4)


def test_pointwise_operations_run_again_where_compiled_layers_keep_everything_and_are_no_error_elsewhere() -> None:
    compiled = FSDP(compile=True)
    assert not FSDP(gradient_checkpointing=False).pointwise_again(28)  # not compiled
    for kept, number, again in (
        (True, None, False), ("selective", None, False), ("selective", 28, False), (True, 27, True), (False, None, True),
    ):  # fmt: skip
        settings = compiled.model_copy(update={"gradient_checkpointing": kept, "checkpointed_layers": number})
        assert settings.pointwise_again(28) is again, (kept, number)
        assert not settings.model_copy(update={"recompute_pointwise": False}).pointwise_again(28)


def test_as_many_layers_compute_again_as_the_model_has_and_no_more() -> None:
    assert not list(FSDP(checkpointed_layers=28).model_errors(ModelCounts(layers=28)))
    ((paths, sentence),) = FSDP(checkpointed_layers=29).model_errors(ModelCounts(layers=28))
    assert paths == ("backend.checkpointed_layers", "model.name")
    assert sentence.startswith("backend.checkpointed_layers=29 is more than the 28 layers of the model: set fewer")


def test_heads_count_where_a_model_does_not_name_its_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 3}')
    counts = read_counts(str(tmp_path))
    assert counts == ModelCounts(layers=None, heads=3, key_heads=3)
    ((_, sentence),) = FSDP(context_parallel_size=2, checkpointed_layers=9).model_errors(counts)
    assert "must divide the model's 3 attention heads" in sentence
    assert not list(Megatron(pipeline_parallel_size=2).model_errors(counts))


def test_ranks_that_do_not_fill_their_shards_are_refused_whatever_the_backend_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDP, "run_errors", BackendSettings.run_errors)
    point = compose_one("backend=fsdp", "backend.context_parallel_size=2", "cluster.trainer_num_workers=3")
    assert "cluster.trainer_num_workers=3 must be a multiple of 2" in sentences(point)
