"""A step that went wrong is kept, and run again alone it says what in it is not a finite number: by name."""

from __future__ import annotations

import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch.distributed as dist

from telescope._launch.prepare_attempt import begin_attempt
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Saved, StepResult, TrainShard, World
from telescope.backends.common import ranks
from telescope.backends.fake import Fake
from telescope.backends.fsdp import FSDP
from telescope.cli import replay_step
from telescope.cli.replay import main
from telescope.cli.replay_step import broken_inputs, share, together
from telescope.config.run import RunConfig, config_hash, dump_run
from telescope.config.sections import EnvironmentEntry, TrainerSettings
from telescope.runlog import checkpoints, kept_steps
from telescope.runlog.attempts import CountedRows, Lineage, write_lineage
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.trainer.kept_batches import Keeper
from telescope.trainer.main import job
from tests.backends.shards import in_minibatches, make_shard, part, with_routing
from tests.config.older import as_an_earlier_version_wrote
from tests.deadlines import refuse_late

ROOT = Path(__file__).resolve().parents[2]


def kept_run(folder: Path, **backend: object) -> tuple[RunDirectory, RunConfig]:
    run = RunDirectory.create(folder / "run")
    config = RunConfig(
        environments={"countdown": EnvironmentEntry(name="countdown")},
        algorithm=GRPO(use_tis=True),
        backend=FSDP(**{"mixed_precision_dtype": None, "gradient_checkpointing": False, **backend}),
        trainer=TrainerSettings(learning_rate=1e-3, seq_len=4096, pad_to_multiple_of=8, keep_batches=2),
    )
    run.config_json.write_text(dump_run(config))
    return run, config


def keeper(run: RunDirectory, config: RunConfig, rank: int = 0, ranks: int = 1, **changes: object) -> Keeper:
    return Keeper(run, config_hash(config), rank, ranks, **{"latest": 2, **changes})


def wrong(left_out: float = 1.0, **metrics: float) -> StepResult:
    return StepResult({"updates_not_finite": left_out, **metrics}, {})


def train_and_keep(run: RunDirectory, config: RunConfig, shard: TrainShard) -> StepResult:
    backend = config.backend.build(job(config, World(0, 1, "cpu"), lambda doing: None))
    try:
        result = backend.train_step(shard)
        keeper(run, config).trained(shard, result)
    finally:
        backend.close()
    return result


def with_advantage(shard: TrainShard, index: int, advantage: float) -> TrainShard:
    items = list(shard.items)
    items[index] = msgspec.structs.replace(items[index], advantage=advantage)
    return replace(shard, items=tuple(items))


def test_a_gradient_that_overflows_in_float16_overflows_again(tmp_path, capsys):
    """The loss is finite, a gradient beyond 65,504: it is run with the loss scale that the step had."""
    run, config = kept_run(tmp_path, mixed_precision_dtype="float16")
    shard = in_minibatches(with_advantage(make_shard(3), 5, 1e5), (4, 4))
    result = train_and_keep(run, config, shard)
    assert (result.metrics["updates_not_finite"], result.metrics["update_skipped"]) == (1.0, 1.0)
    assert result.metrics["loss_scale"] == 65_536.0
    assert main([str(run.path), "--step", "3", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "step 3 of" in said
    assert "trained on version 2 by 1 rank; kept because 1 of its updates had a gradient that was no finite number" in said
    assert "8 trajectories, 143 tokens, 111 of them trained, 2 updates; weights here: tiny, as the run began" in said
    assert "1 of 2 updates had a gradient that is not finite, and moved no weight" in said
    assert "  loss_scale 65536" in said


def test_an_advantage_that_is_not_a_number_is_named(tmp_path, capsys):
    run, config = kept_run(tmp_path)
    train_and_keep(run, config, with_advantage(make_shard(4), 2, float("nan")))
    assert main([str(run.path), "--step", "4"]) == 1
    said = capsys.readouterr().out
    assert "rollout 102 of group 1 (11 tokens): its advantage is nan" in said
    assert "loss nan, gradient norm nan" in said
    assert "1 of 1 updates had a gradient that is not finite" in said


def test_an_advantage_of_a_turn_that_is_not_a_number_is_named_once():
    shard = make_shard(4)
    assert list(broken_inputs(shard)) == []
    wrong = msgspec.structs.replace(shard.items[2], turns=((3, 0.5), (4, math.nan), (4, math.inf)))
    items = (*shard.items[:2], wrong, *shard.items[3:])
    assert list(broken_inputs(replace(shard, items=items))) == ["rollout 102 of group 1 (11 tokens): its advantage is nan"]


def test_a_step_of_an_earlier_versions_run_is_run_again(tmp_path, capsys):
    run, config = kept_run(tmp_path)
    result = train_and_keep(run, config, with_advantage(make_shard(4), 2, float("nan")))
    assert result.metrics["updates_not_finite"] == 1.0
    run.config_json.write_text(as_an_earlier_version_wrote(config, "backend.recompute_pointwise"))
    assert main([str(run.path), "--step", "4"]) == 1
    assert "rollout 102 of group 1 (11 tokens): its advantage is nan" in capsys.readouterr().out


def test_a_missing_log_prob_is_named_and_nothing_is_run(tmp_path, capsys):
    run, config = kept_run(tmp_path)
    shard = make_shard(2)
    logprobs = shard.logprobs.copy()
    logprobs[5 + 4 + 3] = np.inf  # the second trajectory's fourth sampled token
    shard = replace(shard, logprobs=logprobs)
    with pytest.raises(ValueError, match="rollout 101 lacks"):
        train_and_keep(run, config, shard)
    keeper(run, config).broke(shard, ValueError("rollout 101 lacks the sampling log-prob of 1 trained tokens"))
    assert main([str(run.path), "--step", "2"]) == 1
    said = capsys.readouterr().out
    assert "kept because it ended with ValueError: rollout 101 lacks" in said
    assert (
        "rollout 101 of group 0 (23 tokens): the sampling log-prob of 1 trained tokens is not a finite number, first inf at"
        in said
    )


def test_choices_for_the_runs_gpus_and_ranks_are_not_those_of_a_cpu_or_of_fewer():
    run = FSDP(compile=True, gradient_checkpointing="selective", checkpointed_layers=3, context_parallel_size=4)
    worlds = (World(0, 4, "cuda:0"), World(0, 1, "cuda:0"), World(0, 4, "cpu"))
    here = [replay_step._fit_here(run, world, 4) for world in worlds]
    assert [(one.compile, one.gradient_checkpointing, one.checkpointed_layers) for one in here] == [
        (True, "selective", 3), (True, True, None), (False, "selective", 3),
    ]  # fmt: skip
    assert {one.context_parallel_size for one in here} == {1}
    assert replay_step._fit_here(Fake(), World(0, 1, "cpu"), 4) == Fake()


def test_a_sound_step_gives_the_loss_and_norm_of_the_run_whatever_ranks_trained_it(tmp_path, capsys):
    """Two ranks' shards, kept because every third step is; run again by one process."""
    run, config = kept_run(tmp_path)
    shard = in_minibatches(make_shard(3), (4, 4))
    for rank, indices in enumerate(([0, 3, 4, 6], [1, 2, 5, 7])):
        two = keeper(run, config, rank, 2, every=3)
        two.trained(part(shard, indices), wrong(0.0))
        two.trained(replace(part(shard, indices), step=4), wrong(0.0))
    assert kept_steps.steps(run) == [3]
    assert main([str(run.path), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert "by 2 ranks; kept because trainer.keep_batches_every=3" in said
    assert "a gradient that is not finite" not in said
    backend = config.backend.build(job(config, World(0, 1, "cpu"), lambda doing: None))
    result = backend.train_step(shard)
    backend.close()
    assert f"loss {result.metrics['loss']:.4g}"[:-1] in said
    assert f"gradient norm {result.metrics['grad_norm']:.4g}"[:-1] in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_processes_of_torchrun_find_what_one_finds(tmp_path, capsys):
    """As the page says. torchrun listens at the ranks' meeting place itself."""
    run, config = kept_run(tmp_path)
    keeper(run, config, every=3).trained(in_minibatches(make_shard(3), (4, 4)), wrong(0.0))
    assert main([str(run.path), "--step", "3", "--device", "cpu"]) == 0
    alone = capsys.readouterr().out
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "telescope", "replay"]
    done = subprocess.run(
        [sys.executable, *command, str(run.path), "--step", "3", "--device", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert first_numbers(done.stdout) == pytest.approx(first_numbers(alone), rel=1e-4)


def first_numbers(report: str) -> tuple[float, float]:
    """The loss and the gradient's norm."""
    found = re.search(r"loss (\S+), gradient norm (\S+)", report)
    assert found is not None, report
    return float(found[1]), float(found[2])


def test_under_torchrun_the_meeting_place_is_there_already(tmp_path, monkeypatch):
    _, config = kept_run(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    world = replay_step._world("cpu", config)
    assert world == World(rank=0, size=2, device="cpu", met=True)
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents.set("who", "torchrun's")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    assert ranks._store(world, timedelta(seconds=60)).get("who") == b"torchrun's"


def test_a_step_of_ranks_that_shared_rows_and_weights_is_run_by_one(tmp_path, capsys):
    """Both ranks of a pair kept the same trajectories, one with an advantage that is not a number: it counts once."""
    run, config = kept_run(tmp_path, context_parallel_size=2, replicas=2, reshard_after_forward=2)
    shard = with_advantage(make_shard(3), 2, float("nan"))
    for rank in range(4):
        keeper(run, config, rank, 4).trained(part(shard, [rank // 2, *range(2 + rank // 2 * 3, 5 + rank // 2 * 3)]), wrong())
    assert main([str(run.path), "--step", "3", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "trained on version 2 by 4 ranks" in said
    assert "8 trajectories, 143 tokens" in said
    assert "1 of 1 updates had a gradient that is not finite" in said


def test_the_runs_own_checkpoint_of_the_step_before_is_taken(tmp_path, capsys):
    """After two steps the loss of the third is another than that of the model at the start."""
    run, config = kept_run(tmp_path)
    backend = config.backend.build(job(config, World(0, 1, "cpu"), lambda doing: None))
    for step in (1, 2):
        backend.train_step(make_shard(step, seed=step))
    outcomes: queue.Queue[object] = queue.Queue()
    folder = checkpoints.begin(run.checkpoints, 2, "a")
    backend.save(2, checkpoints.trainer_part(folder), outcomes.put)
    assert isinstance(outcomes.get(timeout=60), Saved)
    os.rename(folder, checkpoints.complete_folder(run.checkpoints, 2))
    (checkpoints.complete_folder(run.checkpoints, 2) / checkpoints.COMPLETE).write_text("{}")
    result = backend.train_step(make_shard(3, seed=3))
    backend.close()
    keeper(run, config, every=3).trained(make_shard(3, seed=3), result)
    assert main([str(run.path), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert f"weights here: {checkpoints.complete_folder(run.checkpoints, 2)}" in said
    assert "These weights are not" not in said
    assert f"loss {result.metrics['loss']:.6g}, gradient norm {result.metrics['grad_norm']:.6g}" in said


def test_weights_that_are_not_those_of_the_step_are_said_to_be_others(tmp_path, capsys):
    """Only step 1 began with the weights that the run began with."""
    run, config = kept_run(tmp_path)
    for step in (1, 3):
        train_and_keep(run, config, with_advantage(make_shard(step), 5, math.inf))
        main([str(run.path), "--step", str(step)])
    first, third = capsys.readouterr().out.split("step 3 of", 1)
    assert "These weights are not" not in first
    assert "These weights are not those that step 3 began with: no checkpoint of step 2 is there." in third


def test_shards_of_all_ranks_become_one_and_shared_ones_count_once():
    shard = in_minibatches(make_shard(3), (4, 4))
    header = kept_steps.Header(step=3, rank=0, ranks=4, config_hash="", why="", items=(), denominators=shard.denominators)
    parts = []
    for indices in ([0, 5], [0, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 6, 7]):
        own = part(shard, indices)
        parts.append(
            kept_steps.KeptShard(
                msgspec.structs.replace(header, items=own.items), own.ids, own.mask, own.logprobs, own.versions
            )
        )
    whole = together(parts)
    assert [item.rollout_id for item in whole.items] == [100, 101, 102, 103, 105, 104, 106, 107]
    again = part(whole, [0, 1, 2, 3, 5, 4, 6, 7])
    assert again.ids.tolist() == shard.ids.tolist()
    np.testing.assert_array_equal(again.logprobs, shard.logprobs)
    shares = [share(whole, World(rank, 3, "cpu"), 256) for rank in range(3)]
    assert sorted(item.rollout_id for one in shares for item in one.items) == list(range(100, 108))
    assert [item.minibatch for item in shares[0].items] == sorted(item.minibatch for item in shares[0].items)


def test_recorded_routing_is_kept_with_its_step_and_shared_out_again(tmp_path):
    """One of two ranks had none: it is marked."""
    run, config = kept_run(tmp_path)
    whole = with_routing(make_shard(3), layers=2, experts=4, top_k=2)
    for rank, indices in enumerate(([0, 5], [1, 2, 3, 4, 6, 7])):
        own = part(whole, indices)
        keeper(run, config, rank, 2).trained(own if rank else replace(own, routed=None), wrong())
    found = together(kept_steps.read(run, 3))
    order = [item.rollout_id - 100 for item in found.items]
    assert sorted(order) == list(range(8))
    pieces = np.split(found.routed, np.cumsum([item.length for item in found.items])[:-1])
    for index, piece in zip(order, pieces, strict=True):
        expected = part(whole, [index]).routed
        np.testing.assert_array_equal(piece, np.full_like(expected, 255) if index in (0, 5) else expected)
    one, other = (share(found, World(rank, 2, "cpu"), 256) for rank in (0, 1))
    assert len(one.routed) + len(other.routed) == len(found.routed) == len(whole.ids)


def test_a_step_that_an_older_telescope_kept_is_refused_with_the_remedy(tmp_path):
    run, _ = kept_run(tmp_path)
    folder = run.kept(3)
    folder.mkdir(parents=True)
    items = [{"rollout_id": 1, "group_id": 0, "sequence": 0, "length": 1, "advantage": 0.5, "sequence_tokens": 0}]
    header = np.frombuffer(msgspec.msgpack.encode({"format": 1, "step": 3, "items": items}), np.uint8)
    np.savez(folder / "rank_0.npz", header=header, **{name: np.zeros(1) for name in kept_steps.ARRAYS})
    with pytest.raises(kept_steps.NothingKept, match="has format 1, and this Telescope reads 2: run the step again with the"):
        kept_steps.read(run, 3)


def test_only_the_latest_steps_that_went_wrong_are_kept(tmp_path):
    run, config = kept_run(tmp_path)
    keeping = keeper(run, config)
    for step in range(1, 6):
        keeping.trained(make_shard(step), wrong(float(step != 3)))
    assert kept_steps.steps(run) == [4, 5]
    keeper(run, config, latest=0).trained(make_shard(9), wrong())
    assert kept_steps.steps(run) == [4, 5]


def test_a_step_that_broke_on_one_rank_is_kept_by_those_that_waited_for_it(tmp_path, capsys):
    """Rank 1 of 3 fails; rank 0 is told that another was lost, rank 2 that it is to end."""
    run, config = kept_run(tmp_path)
    shard = make_shard(3)
    ranks = [keeper(run, config, rank, 3) for rank in range(3)]
    for rank, keeping in enumerate(ranks):
        keeping.begins(part(shard, [rank, rank + 3, *([6, 7] if rank == 2 else [])]))
    ranks[0].left()  # too early: nobody has kept anything, so this may be a run that is stopped
    assert kept_steps.steps(run) == []
    ranks[1].broke(part(shard, [1, 4]), RuntimeError("out of memory"))
    for keeping in ranks:
        keeping.left()
        keeping.left()
    assert [found.header.why for found in kept_steps.read(run, 3)] == [
        "another rank kept its part of it",
        "it ended with RuntimeError: out of memory",
        "another rank kept its part of it",
    ]
    assert main([str(run.path), "--step", "3", "--device", "cpu"]) == 0
    assert "8 trajectories, 143 tokens" in capsys.readouterr().out


def test_a_step_that_is_over_is_not_kept_for_another_ranks_sake(tmp_path):
    run, config = kept_run(tmp_path)
    one, two = (keeper(run, config, rank, 2) for rank in range(2))
    one.begins(make_shard(3))
    one.trained(make_shard(3), wrong(0.0))
    two.broke(make_shard(3), RuntimeError("out of memory"))
    one.left()
    assert list(kept_steps._parts(run, 3)) == [1]
    keeper(run, config, 1, 2, latest=0).broke(make_shard(4), RuntimeError("nobody wants it"))
    assert kept_steps.steps(run) == [3]


STUCK = """
import ctypes, sys
import telescope.wire.process as process
from pathlib import Path
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.attempts import CountedRows, Lineage, write_lineage
from telescope.trainer.kept_batches import Keeper, last_word
from tests.backends.shards import make_shard

signals = process.ProcessSignals()
signals.watch()
keeper = Keeper(RunDirectory(Path(sys.argv[1])), "hash", 0, 2, latest=2)
with last_word(keeper), signals.hold():
    keeper.begins(make_shard(3))
    mutex = ctypes.create_string_buffer(128)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("stuck", flush=True)
    lock(mutex)
"""


def test_a_rank_that_is_stuck_inside_a_library_writes_its_part_when_it_is_told_to_end(tmp_path):
    """No Python runs in its main thread any more, as in a collective on GPUs whose other rank is gone."""
    run, config = kept_run(tmp_path)
    keeper(run, config, 1, 2).broke(make_shard(3), RuntimeError("out of memory"))
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(run.path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 90
        while len(kept_steps._parts(run, 3)) < 2:
            refuse_late(deadline)
            time.sleep(0.02)
        assert process.poll() is None  # stuck all the same
    finally:
        process.kill()
        process.wait(60)
    assert kept_steps.read(run, 3)[0].header.why == "another rank kept its part of it"


def test_a_step_of_an_earlier_attempt_is_run_with_its_own_settings_and_the_runs_checkpoints(tmp_path, capsys):
    run, config = kept_run(tmp_path)
    first = run.earlier_attempt(2)
    first.mkdir(parents=True)
    keeper(RunDirectory(first), config).broke(make_shard(3), RuntimeError("out of memory"))
    (first / "config.json").write_text(run.config_json.read_text())
    run.config_json.write_text("{}")
    keeper(run, config).broke(make_shard(5), RuntimeError("out of memory"))
    assert main([str(run.path), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert f"step 3 of {first}, trained on version 2 by 1 rank" in said
    assert main([str(run.path), "--step", "4"]) == 1
    assert f"step 4 of {run.path} was not kept (kept are: 3, 5)" in capsys.readouterr().err
    assert RunDirectory(first).whole == run.whole == run


def test_a_step_that_two_attempts_have_trained_is_run_with_the_weights_of_its_own(tmp_path, capsys):
    """Attempt 1 kept its step 5 and died; attempt 2 went on after step 2 and made another checkpoint of step 4."""
    run, config = kept_run(tmp_path)
    write_identity(run, msgspec.structs.replace(new_identity("r", datetime.now(UTC), ""), attempt="one"))
    keeper(run, config).broke(make_shard(5), RuntimeError("out of memory"))
    losses = {}
    for name, seed in (("one", 1), ("two", 2)):
        backend = config.backend.build(job(config, World(0, 1, "cpu"), lambda doing: None))
        backend.train_step(make_shard(4, seed=seed))
        outcomes: queue.Queue[object] = queue.Queue()
        folder = checkpoints.begin(run.checkpoints, 4, name)
        backend.save(4, checkpoints.trainer_part(folder), outcomes.put)
        assert isinstance(outcomes.get(timeout=60), Saved)
        losses[name] = backend.train_step(make_shard(5)).metrics["loss"]
        backend.close()
        if name == "two":
            assert begin_attempt(run, "", "two") == 2
            write_lineage(run, Lineage(2, 2, (CountedRows(1, 0, 2),)))
            checkpoints.set_later_aside(run.checkpoints, 2, "two")
        checkpoints.finish(folder, facts_of_step_4(attempt=name))
    aside = run.checkpoints / "step_00000004.before-two"
    assert main([str(run.path), "--step", "5"]) == 0
    said = capsys.readouterr().out
    assert f"weights here: {aside}" in said
    assert f"loss {losses['one']:.6g}," in said
    assert f"{losses['one']:.6g}" != f"{losses['two']:.6g}"
    keeper(run, config).broke(make_shard(5), RuntimeError("out of memory"))
    assert main([str(run.path), "--step", "5"]) == 0
    said = capsys.readouterr().out
    assert f"weights here: {checkpoints.complete_folder(run.checkpoints, 4)}" in said
    assert f"loss {losses['two']:.6g}," in said
    shutil.rmtree(aside)
    assert main([str(run.earlier_attempt(1)), "--step", "5"]) == 0
    said = capsys.readouterr().out
    assert "These weights are not those that step 5 began with: attempt two trained step 4 too" in said
    assert "the checkpoint of attempt one, which this step followed, is gone" in said


def facts_of_step_4(attempt: str) -> checkpoints.Complete:
    return checkpoints.Complete(
        format=checkpoints.FORMAT, step=4, version=4, run_id="r", attempt=attempt, config_hash="", world_size=1,
        training_state=True, nbytes=0, seconds=0.0, written=checkpoints.now(),
    )  # fmt: skip


def test_a_folder_that_takes_nothing_stops_no_training(tmp_path, caplog):
    run, config = kept_run(tmp_path)
    (run.path / "kept").write_text("a file where the folder should be")
    keeper(run, config).trained(make_shard(1), wrong())
    assert "the batch of step 1 can't be kept" in caplog.text


def test_what_was_not_kept_or_not_wholly_is_refused_in_words(tmp_path, capsys):
    run, config = kept_run(tmp_path)
    keeper(run, config, 0, 2).trained(make_shard(3), wrong())
    for step, words in ((7, "step 7 of .* was not kept (kept are: 3). trainer.keep_batches"), (3, "lacks rank_1.npz")):
        assert main([str(run.path), "--step", str(step)]) == 1
        assert words.partition(" of .* ")[2] or words in capsys.readouterr().err
    (run.kept(3) / "rank_1.npz").write_bytes(b"PK no such thing")
    assert main([str(run.path), "--step", "3"]) == 1
    assert "rank_1.npz is damaged: " in capsys.readouterr().err
    keeper(run, config).trained(make_shard(4), wrong())
    assert main([str(run.path), "--step", "4", "--weights", str(tmp_path)]) == 1
    assert "is not a folder with a model in it" in capsys.readouterr().err
    assert main([str(run.path), "--weights", str(tmp_path)]) == 2
