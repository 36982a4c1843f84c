"""What a rank saves is all it needs: a backend that begins with a checkpoint goes on to the bit, in a world of any size."""

from __future__ import annotations

import queue
import random
import resource
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from telescope.backends.base import CheckpointUnfit, NotSaved, Saved, SaveSettings
from telescope.backends.common import randomness, saving
from telescope.backends.common.staging import HostCopies
from telescope.config.sections import LoraSettings, ModelSettings
from tests.backends.models import random_experts, random_model
from tests.backends.options import flat
from tests.backends.shards import make_job, make_shard
from tests.backends.test_ranks import run_ranks

PATIENCE_S = 100

SPEED = {"trainer_tokens_per_s", "mfu"}


def save(backend, step: int, folder: Path, *, training_state: bool = True) -> Saved:
    outcomes: queue.Queue = queue.Queue()
    backend.save(step, folder, outcomes.put, training_state=training_state)
    outcome = outcomes.get(timeout=PATIENCE_S)
    assert isinstance(outcome, Saved), outcome
    return outcome


def train(backend, *steps: int) -> list[dict[str, float]]:
    """Metrics of steps, but for those of speed."""
    found = [backend.train_step(make_shard(step, seed=step)).metrics for step in steps]
    return [{name: value for name, value in metrics.items() if name not in SPEED} for metrics in found]


def weights(backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


LORA = ModelSettings(name="tiny", lora=LoraSettings(rank=2, alpha=4))


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (None, {}),
        (None, {"optimizer": "sgd"}),
        (LORA, {}),
        (None, {"mixed_precision_dtype": "float16"}),
        (None, {"optimizer": "adamw_8bit"}),
        (None, {"optimizer": "muon"}),
        (None, {"offload": "optimizer"}),
    ],
    ids=["adamw", "sgd", "lora", "float16", "adamw 8bit", "muon", "offload"],
)
def test_two_steps_a_checkpoint_and_two_more_are_four_steps_to_the_bit(build, tmp_path, model, settings):
    job = make_job(lr_scheduler="linear", warmup_steps=1)
    job = job if model is None else replace(job, model=model)
    first = build(job, **settings)
    train(first, 1, 2)
    save(first, 2, tmp_path / "trainer")
    expected, ends_at = train(first, 3, 4), weights(first)
    second = build(replace(job, resume=tmp_path / "trainer"), **settings)
    assert train(second, 3, 4) == expected
    found = weights(second)
    assert all(torch.equal(found[name], ends_at[name]) for name in ends_at)
    assert found.keys() == ends_at.keys()


def test_a_weight_that_nothing_flows_through_is_no_obstacle_to_going_on(build, tmp_path):
    """The bias with which Ernie's routers choose is a parameter without a gradient: it has no moments, before and after."""
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
    job = make_job(model=random_experts(tmp_path / "model", "ernie4_5_moe", **experts))
    first = build(job)
    train(first, 1)
    bias = next(p for name, p in first._policy.named_parameters() if name.endswith("e_score_correction_bias"))
    assert bias not in first._updater.optimizer.state
    save(first, 1, tmp_path / "trainer")
    expected, ends_at = train(first, 2), weights(first)
    second = build(replace(job, resume=tmp_path / "trainer"))
    assert train(second, 2) == expected
    found = weights(second)
    assert all(torch.equal(found[name], ends_at[name]) for name in ends_at)


@pytest.mark.parametrize(("before", "after"), [("adamw", "sgd"), ("adamw", "muon"), ("muon", "adamw"), ("adamw", "adamw_8bit")])
def test_another_optimisers_state_is_refused(build, tmp_path, before, after):
    first = build(make_job(), optimizer=before)
    train(first, 1)
    save(first, 1, tmp_path / "trainer")
    with pytest.raises(CheckpointUnfit, match=r"resume with the backend\.optimizer that wrote it"):
        build(replace(make_job(), resume=tmp_path / "trainer"), optimizer=after)


def test_what_is_written_are_the_weights_of_the_step_though_training_goes_on(build, tmp_path, monkeypatch):
    """The writing thread waits until the next step is trained."""
    trained, write = threading.Event(), saving._write_files

    def later(*arguments):
        assert trained.wait(PATIENCE_S)
        return write(*arguments)

    monkeypatch.setattr(saving, "_write_files", later)
    backend, outcomes = build(make_job()), queue.Queue()
    train(backend, 1)
    before = weights(backend)
    backend.save(1, tmp_path, outcomes.put)
    train(backend, 2)
    trained.set()
    assert isinstance(outcomes.get(timeout=PATIENCE_S), Saved)
    again = weights(build(replace(make_job(), resume=tmp_path)))
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_a_save_waits_for_the_one_before_and_says_so(build, tmp_path, caplog):
    backend, outcomes = build(make_job()), queue.Queue()
    go_on = threading.Event()
    backend._saver._writing = threading.Thread(target=go_on.wait, args=(PATIENCE_S,), daemon=True)
    backend._saver._writing.start()
    threading.Timer(0.2, go_on.set).start()
    with caplog.at_level("INFO"):
        backend.save(1, tmp_path / "step_00000001" / "trainer", outcomes.put)
    assert isinstance(outcomes.get(timeout=PATIENCE_S), Saved)
    assert go_on.is_set()
    assert "step_00000001 waits for it" in caplog.text


def test_a_save_that_never_ends_makes_the_next_one_fail_and_names_the_setting(build, tmp_path):
    backend, outcomes = build(replace(make_job(), saving=SaveSettings(timeout_s=0.1))), queue.Queue()
    go_on = threading.Event()
    backend._saver._writing = threading.Thread(target=go_on.wait, args=(PATIENCE_S,), daemon=True)
    backend._saver._writing.start()
    backend.save(2, tmp_path, outcomes.put)
    assert "0.1 s (checkpoint.timeout_s)" in outcomes.get(timeout=1).cause
    go_on.set()


def test_weights_alone_leave_the_optimiser_to_begin_anew(build, tmp_path, caplog):
    job = replace(make_job(), saving=SaveSettings(background=False))
    backend = build(job)
    train(backend, 1, 2)
    size = save(backend, 2, tmp_path, training_state=False).nbytes
    at_two = weights(backend)
    assert size < 1.05 * sum(tensor.nbytes for tensor in at_two.values())
    with caplog.at_level("WARNING"):
        again = build(replace(job, resume=tmp_path))
    assert "weights alone" in caplog.text
    assert all(torch.equal(tensor, at_two[name]) for name, tensor in weights(again).items())
    assert not again._updater.optimizer.state


def test_skipped_updates_and_the_loss_scale_are_counted_on(build, tmp_path):
    backend = build(make_job(), mixed_precision_dtype="float16")
    backend._updater.skipped, backend._updater._scale.scale, backend._updater._scale.good = 3, 1024.0, 7
    save(backend, 1, tmp_path)
    again = build(replace(make_job(), resume=tmp_path), mixed_precision_dtype="float16")
    assert again._updater.counters() == {"skipped": 3, "scale": 1024.0, "good": 7}


def test_a_run_that_goes_on_in_float16_begins_with_its_first_scale(build, tmp_path):
    """And not with the 1 of the precision before, with which small gradients would be 0."""
    backend = build(make_job(), mixed_precision_dtype="bfloat16")
    save(backend, 1, tmp_path)
    again = build(replace(make_job(), resume=tmp_path), mixed_precision_dtype="float16")
    assert again._updater.counters() == {"skipped": 0, "scale": 65_536.0, "good": 0}


def test_a_step_that_is_run_again_has_its_own_loss_scale_and_not_the_checkpoints(build, tmp_path):
    backend = build(make_job(), mixed_precision_dtype="float16")
    backend._updater._scale.scale = 1024.0
    save(backend, 1, tmp_path)
    recorded = replace(make_job(), resume=tmp_path, recorded_loss_scale=256.0)
    assert build(recorded, mixed_precision_dtype="float16")._updater.loss_scale == 256.0
    unknown = replace(recorded, recorded_loss_scale=None)
    assert build(unknown, mixed_precision_dtype="float16")._updater.loss_scale == 1024.0


def test_all_random_generators_go_on_where_they_were():
    draws = lambda: (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())  # noqa: E731
    np.random.standard_normal()  # leaves the second of its pair for the next call
    state = randomness.state("cpu")
    expected = draws()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    randomness.restore(state, "cpu")
    assert draws() == expected


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(build, tmp_path):
    save(build(make_job()), 1, tmp_path / "saved")
    other = random_model(tmp_path / "other", vocab_size=129)
    with pytest.raises(CheckpointUnfit, match=r"has shape \[\d+, \d+\], and here it has \[129, 32\]"):
        build(replace(make_job(model=other), resume=tmp_path / "saved"))


def test_a_torn_file_is_refused_with_its_folder_and_the_remedy(build, tmp_path):
    save(build(make_job()), 1, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointUnfit, match=f"{tmp_path} can't be read: .*resume from an earlier step"):
        build(replace(make_job(), resume=tmp_path))


def test_a_disk_that_is_full_is_the_cause_of_one_failed_save_and_training_goes_on(build, tmp_path):
    """A limit on the size of files stands for the disk."""
    backend, outcomes = build(make_job()), queue.Queue()
    train(backend, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        backend.save(1, tmp_path / "full", outcomes.put)
        outcome = outcomes.get(timeout=PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(outcome, NotSaved)
    assert "full can't be written" in outcome.cause
    assert "File too large" in outcome.cause
    train(backend, 2)
    save(backend, 2, tmp_path / "room")


def test_saves_are_copied_into_the_same_memory_and_a_changed_shape_into_new():
    copies = HostCopies("cpu")
    first = copies.take({"a": torch.ones(3), "b": torch.ones(2)})
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    again = copies.take({"a": torch.full((3,), 2.0), "b": torch.zeros(4)})
    assert (again["a"].tolist(), again["b"].tolist()) == ([2.0] * 3, [0.0] * 4)
    assert again["a"].data_ptr() == places["a"]
    assert first["a"].tolist() == [2.0] * 3


def test_memory_reserved_ahead_is_what_saves_are_copied_into():
    copies = HostCopies("cpu")
    copies.reserve({"a": torch.ones(3)})
    (home,) = copies._homes.values()
    assert home.tolist() == [0.0] * 3
    assert copies.take({"a": torch.ones(3)})["a"].data_ptr() == home.data_ptr()


def test_memory_is_reserved_once_where_a_gpus_saves_will_come(tmp_path):
    """The first save waits for it."""
    assert not saving.Saver(0, "cpu", SaveSettings(expected=True)).wants_memory
    assert not saving.Saver(0, "cuda:0", SaveSettings()).wants_memory
    assert not saving.Saver(0, "cuda:0", SaveSettings(expected=True, background=False)).wants_memory
    saver, outcomes = saving.Saver(0, "cuda:0", SaveSettings(expected=True)), queue.Queue()
    assert saver.wants_memory
    saver._copies = HostCopies("cpu")
    saver.reserve({"a": torch.ones(3)})
    assert not saver.wants_memory
    saver.save({"a": torch.ones(3)}, tmp_path / "saved", outcomes.put)
    assert isinstance(outcomes.get(timeout=PATIENCE_S), Saved)
    assert saving.ShardReader(tmp_path / "saved").read("a", torch.float32).tolist() == [1.0] * 3


def test_a_save_whose_memory_is_not_there_in_time_fails_alone(tmp_path):
    saver, outcomes, had = saving.Saver(0, "cpu", SaveSettings(timeout_s=0.01)), queue.Queue(), threading.Event()
    saver._copies.reserve = lambda own: had.wait(PATIENCE_S)
    saver.reserve({"a": torch.ones(3)})
    try:
        saver.save({"a": torch.ones(3)}, tmp_path / "saved", outcomes.put)
        found = outcomes.get(timeout=PATIENCE_S)
    finally:
        had.set()
    assert isinstance(found, NotSaved)
    assert found.cause == "host memory for the copy is still being pinned after 0.01 s (checkpoint.timeout_s)"
    assert not (tmp_path / "saved").exists()


MUON, BYTES, HOSTED = {"optimizer": "muon"}, {"optimizer": "adamw_8bit"}, {"offload": "optimizer"}
MOVES = {
    "adamw": {},
    "muon": {"before": MUON, "after": MUON},
    "muon, from the host": {"before": MUON | HOSTED, "after": MUON},
    "a byte": {"before": BYTES, "after": BYTES},
    "a byte, to the host": {"before": BYTES, "after": BYTES | HOSTED},
    "adapters": {"lora": True},
    "adapters, muon, from the host": {"lora": True, "before": MUON | HOSTED, "after": MUON},
    "adapters, a byte, to the host": {"lora": True, "before": BYTES, "after": BYTES | HOSTED},
    "all on the host, then nothing": {"before": {"offload": "parameters"}},
}
"""How a run was saved and goes on. See rank.py."""


@pytest.mark.parametrize("move", [pytest.param(name, marks=[pytest.mark.slow] if name != "adamw" else []) for name in MOVES])
def test_two_ranks_resume_as_one_and_as_two_and_one_as_two(build, tmp_path, move):
    """Of a model whose sizes two ranks can't share evenly, and whose rows take two blocks of codes; a world of the same size
    goes on to the bit. What the moments of the checkpoint were shows in the second step after it."""
    how = MOVES[move]
    before, after = how.get("before", {}), how.get("after", {})
    sizes = {"hidden_size": 25, "head_dim": 10, "intermediate_size": 300, "vocab_size": 129}
    model = random_model(tmp_path / "model", tie_word_embeddings=False, **sizes)
    lora = LoraSettings(rank=2, alpha=4) if how.get("lora") else None
    job = replace(make_job(seq_len=96, pad_to_multiple_of=16), model=ModelSettings(name=model, lora=lora))
    backend = build(job, **before)
    train(backend, 1)
    save(backend, 1, tmp_path / "by-one")
    expected, ends = train(backend, 2, 3), flat(weights(backend))
    for code, output in run_ranks("resume", tmp_path, model, model, model, how=how):
        assert code == 0, output
    names = saving.ShardReader(tmp_path / "by-two").shapes
    assert any("exp_avg_codes" in name for name in names) == ("a byte" in move and lora is None)
    assert any("momentum_buffer" in name for name in names) == ("muon" in move)
    runs = {}
    for name in ("two", "two-as-two", "one-as-two"):
        with np.load(tmp_path / f"{name}.npz") as file:
            runs[name] = file["told"], file["weights"]
    for found, same in zip(runs["two-as-two"], runs["two"], strict=True):
        assert np.array_equal(found, same)
    by_one = build(replace(job, resume=tmp_path / "by-two"), **after)
    told = train(by_one, 2, 3)
    runs["two-as-one"] = np.array([[m["loss"], m["grad_norm"]] for m in told]), flat(weights(by_one))
    for name, (losses, there) in runs.items():
        assert losses == pytest.approx(np.array([[m["loss"], m["grad_norm"]] for m in expected]), rel=2e-5), name
        # of 1e-3 and more that a weight goes in the two steps; Muon's matrices travel in bfloat16
        assert float(np.abs(there - ends).mean()) < (1e-5 if "muon" in move else 1e-7), name
