"""A run whose trainer ranks are on two hosts: one of them goes down, and another attempt goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from telescope.runlog.checkpoints import steps as complete_steps
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows, rows_of_attempt
from tests.run.hosts import Hosts
from tests.run.test_bare_metal import plain, summary
from tests.run.test_resumed_runs import TRAINED_ANEW, batches, learned

SETTINGS = (
    *("backend=fsdp", "trainer.learning_rate=1e-3", "orchestrator.max_async_rollout=0", "seed=5", "cluster.device=cpu"),
    *("cluster.nodes=2", "cluster.trainer_num_workers=2", "cluster.trainer_placement=STRICT_SPREAD", "checkpoint.every=2"),
    "orchestrator.silent_s=10",
)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(2, tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hosts_go_on_to_the_bit_after_one_of_them_went_down(pair: Hosts, tmp_path: Path) -> None:
    """Steps 3 and 4 are trained twice: before the second host is switched off, and by an attempt that begins after step 2."""
    run = RunDirectory(tmp_path / "run")
    for host in (0, 1):
        plain(pair, host, *SETTINGS, "number_of_steps=100000", f"run_dir={run.path}")
    pair.until(lambda: 4 in complete_steps(run.checkpoints), "saved step 4")
    pair.remember()
    for process in (psutil.Process(pair.commands[1].pid), *pair.seen[1]):
        if process.is_running():
            process.kill()
    assert pair.wait(0) == 70, pair.everything()
    pair.commands[1].wait(60)
    assert pair.left() == []
    resumed = ("-m", "telescope", "runs", "resume", str(run.path), "checkpoint.resume=2", "number_of_steps=5")
    for host in (0, 1):
        pair.start(host, *resumed, f"cluster.node_rank={host}", *pair.settings(host))
    assert (pair.wait(0), pair.wait(1)) == (0, 0), pair.everything()
    first = RunDirectory(run.earlier_attempt(1))
    one, two = (rows_of_attempt(place, "step_metrics") for place in (first, run))
    assert sorted(learned(two)) == [3, 4, 5]
    pairs = [(learned(one)[step][name], learned(two)[step][name], step, name) for step in (3, 4) for name in TRAINED_ANEW]
    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    one, two = (rows_of_attempt(place, "batches") for place in (first, run))
    assert {step: batches(one)[step] for step in (3, 4)} == {step: batches(two)[step] for step in (3, 4)}
    assert [row["step"] for row in rows(run, "step_metrics")] == [1, 2, 3, 4, 5]
    assert summary(run)["steps"] == 5
    assert pair.left() == []
