"""What a run saves at its end, by `checkpoint.at_end`, and how many bytes that is."""

from __future__ import annotations

import pytest

from telescope.config.end_saves import NOTHING, EndSaves, SaveBytes, count_save_bytes, format_bytes
from tests.config.conftest import compose_one, sentences

COARSE = (
    "backend.use_precision_aware_optimizer=true", "backend.exp_avg_dtype=bfloat16", "backend.exp_avg_sq_dtype=bfloat16",
    "trainer.betas=[0.9, 0.95]",
)  # fmt: skip
AUTO = EndSaves("weights", "state", gives_way=True)


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ((), AUTO),
        (("checkpoint.save_training_state=false",), EndSaves("weights", "weights", gives_way=True)),
        (("checkpoint.every=10",), EndSaves("state", "state")),
        (("checkpoint.every=10", "checkpoint.save_training_state=false"), EndSaves("weights", "weights")),
        (("checkpoint.every=10", "checkpoint.at_end=weights"), EndSaves("weights", "weights")),
        (("checkpoint.at_end=state",), EndSaves("state", "state")),
        (("checkpoint.at_end=none",), NOTHING),
        (("checkpoint.every=10", "checkpoint.at_end=none"), NOTHING),
        (("experiment=fake",), NOTHING),  # it has no model
        (("experiment=fake", "checkpoint.every=10"), EndSaves("state", "state")),
        (("cluster=slurm",), AUTO),
    ],
)
def test_what_is_saved_after_the_last_step_and_at_a_stop(given, saved):
    found = compose_one(*given).config
    assert found.end_saves == saved
    assert found.saves is (saved.any or found.checkpoint.every > 0)


def test_hosts_that_share_no_folder_save_only_where_they_are_told_a_place(tmp_path):
    """Each would write its ranks' part to a disk of its own, and no checkpoint would be whole."""
    key = tmp_path / "key"
    key.write_text("k")
    hosts = ("cluster=bare_metal", "cluster.nodes=2", f"cluster.key_file={key}")
    assert compose_one(*hosts).config.end_saves == NOTHING
    assert compose_one(*hosts, "checkpoint.dir=/shared/saves").config.end_saves == AUTO


def test_what_a_stop_waits_for():
    assert compose_one().config.stop_timeout_s == 120
    assert compose_one("checkpoint.at_end=none").config.stop_timeout_s == 0
    assert compose_one("checkpoint.stop_timeout_s=30").config.stop_timeout_s == 30


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ((), SaveBytes(936_320, 2_808_960)),  # 234,080 parameters in float32, and two moments of each
        (("model=qwen3-4b",), SaveBytes(4 * 4_022_468_096, 12 * 4_022_468_096)),
        (("model=qwen3-4b", "backend.optimizer=sgd"), SaveBytes(4 * 4_022_468_096, 4 * 4_022_468_096)),
        (("model=qwen3-4b", "model.lora={rank: 16}"), SaveBytes(4 * 33_030_144, 12 * 33_030_144)),
        (("model=qwen3-4b", "backend=megatron"), SaveBytes(4 * 4_022_468_096, 12 * 4_022_468_096)),
        (("model=qwen3-4b", "backend=megatron", *COARSE), SaveBytes(4 * 4_022_468_096, 8 * 4_022_468_096)),
        (("model=any", "model.name=owner/unknown"), None),
        (("experiment=fake",), None),
    ],
)
def test_bytes_follow_from_the_models_shape(given, nbytes):
    assert count_save_bytes(compose_one(*given).config) == nbytes


def test_state_at_the_end_of_a_run_that_saves_weights_alone_is_refused():
    said = sentences(compose_one("checkpoint.at_end=state", "checkpoint.save_training_state=false"))
    assert said.endswith("checkpoint.save_training_state=false saves the weights alone: leave one of them out")


@pytest.mark.parametrize(("nbytes", "text"), [(936_320, "0.9 MB"), (48_269_617_152, "48.3 GB"), (3e8, "0.3 GB")])
def test_bytes_are_told_in_the_unit_of_disks(nbytes, text):
    assert format_bytes(nbytes) == text
