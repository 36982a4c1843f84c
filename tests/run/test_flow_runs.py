"""Scheduling with real processes, sockets and files: lanes, loads, and what has hung other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.replay import JournalLine, decode_line, replay
from telescope.runlog.journal import journal_lines
from tests.run.conftest import Start, WholeRun

SLOW_REWARD = """
import time
from telescope.environments.base import Prompt, Reward, SingleTurn
class Slow(SingleTurn):
    def prompts(self, split):
        return [Prompt(turns=({'role': 'user', 'content': f'rev ab{number}'},)) for number in range(50)]
    def reward(self, prompt, answer):
        time.sleep(0.2)
        return Reward(float(sum(map(ord, answer)) % 7))
"""
EQUAL_AT_FIRST = """
from telescope.environments.base import Prompt, Reward, SingleTurn
class Late(SingleTurn):
    reward_in_thread = False
    _scored = [0]
    def prompts(self, split):
        return [Prompt(turns=({'role': 'user', 'content': f'rev ab{number}'},)) for number in range(500)]
    def reward(self, prompt, answer):
        self._scored[0] += 1
        return Reward(float(self._scored[0] % 2 if self._scored[0] > 400 else 1))
"""


def plugin(folder: Path, name: str, text: str) -> tuple[str, ...]:
    """Overrides that choose an environment written for the occasion."""
    place = folder / "mine" / "plugins" / "environments"
    place.mkdir(parents=True)
    (place / f"{name}.py").write_text(text)
    return ("--config-dir", str(folder / "mine"), f"env={name}")


def journal(run: WholeRun) -> list[JournalLine]:
    lines = list(journal_lines(run.directory.journal))
    found = replay(lines)
    assert found.disagreement is None, str(found.disagreement)
    return [decode_line(line, number) for number, line in enumerate(lines[1:], start=2)]


def most_at_once(lines: list[JournalLine]) -> int:
    """Orders that workers held at the same time."""
    most, orders = 0, set()
    for line in lines:
        if isinstance(line.event, seen.RolloutDone | seen.RolloutFailed):
            orders.discard((line.event.rollout_id, line.event.attempt))
        orders |= {(c.order.rollout_id, c.order.attempt) for c in line.commands if isinstance(c, do.DispatchRollout)}
        most = max(most, len(orders))
    return most


ONE_GROUP_LANE = (
    "experiment=fake",
    "number_of_steps=2",
    "orchestrator.max_concurrent_prompts_per_server=1",
    "orchestrator.discard_group_zero_advantage=false",
)


def test_rollouts_start_while_others_are_scored(start: Start, tmp_path: Path):
    """Four lanes. With the lanes free before the reward, more than four rollouts are with the worker."""
    run = start(*ONE_GROUP_LANE, *plugin(tmp_path, "slow", SLOW_REWARD))
    assert run.wait() == 0, run.said()
    lines = journal(run)
    assert most_at_once(lines) > 4
    freed = [line for line in lines if isinstance(line.event, seen.GenerationOver)]
    assert any(isinstance(command, do.DispatchRollout) for line in freed for command in line.commands)


@pytest.mark.slow
def test_a_lane_held_through_the_reward_keeps_others_waiting(start: Start, tmp_path: Path):
    held = "orchestrator.free_lane_after_generation=false"
    run = start(*ONE_GROUP_LANE, held, *plugin(tmp_path, "slow", SLOW_REWARD))
    assert run.wait() == 0, run.said()
    lines = journal(run)
    assert most_at_once(lines) == 4
    assert not any(isinstance(line.event, seen.GenerationOver) for line in lines)


def test_lanes_follow_what_the_servers_say_and_the_journal_says_the_same_again(start: Start):
    run = start(
        "experiment=fake",
        "number_of_steps=4",
        "orchestrator.adaptive_concurrency=true",
        "inference.fake_token_s=0.05",
        "inference.fake_kv_tokens=40",  # two or three requests fill it: more come at once on the slowest machine
        "cluster.inference_num_workers=2",
    )
    assert run.wait() == 0, run.said()
    loads = [line.event for line in journal(run) if isinstance(line.event, seen.ServerLoad)]
    assert {load.server for load in loads} == {"server-0", "server-1"}
    assert max(load.kv_used for load in loads) == 1.0
    assert run.status()["counts"]["lanes"] < 2 * 16 * 4


def test_groups_of_one_sample_one_server_one_worker_one_lane(start: Start):
    run = start(
        "experiment=fake",
        "algorithm=reinforce_pp",
        "rollout.group_size=1",
        "rollout.min_group_size=1",
        "orchestrator.max_concurrent_prompts_per_server=1",
        "cluster.inference_num_workers=1",
        "cluster.trainer_num_workers=1",
        "cluster.rollouts_per_env_worker=1",
    )
    assert run.wait() == 0, run.said()
    assert most_at_once(journal(run)) == 1
    assert run.summary()["steps"] == 3


@pytest.mark.slow
def test_equal_rewards_for_twenty_five_batches_hold_nothing_up(start: Start, tmp_path: Path):
    run = start("experiment=fake", "number_of_steps=2", *plugin(tmp_path, "late", EQUAL_AT_FIRST))
    assert run.wait() == 0, run.said()
    assert run.summary()["reasons"]["discarded: zero_advantage"] >= 90  # batches are of four groups of four
    assert any("groups in a row had equal rewards" in row["message"] for row in run.rows("alerts"))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_step_two_and_lag_plus_one_with_lanes_of_groups_in_admission_order(start: Start, steps: int):
    run = start(
        "experiment=fake",
        f"number_of_steps={steps}",
        "orchestrator.max_async_rollout=2",
        "orchestrator.take_order=admission",
        "orchestrator.enable_individual_sample_lanes=false",
        "orchestrator.free_lane_after_generation=false",
        "orchestrator.max_concurrent_prompts_per_server=2",
    )
    assert run.wait() == 0, run.said()
    assert run.summary()["steps"] == steps
    ends = {}
    for row in run.rows("groups"):
        ends.setdefault(row["group_id"], []).append(row["state"])
    assert all(states[0] == "pending" for states in ends.values())
    assert all(len(set(states)) == len(states) for states in ends.values())  # one row a transition, none repeated
    assert sum(states[-1] == "trained" for states in ends.values()) == 4 * steps
    assert {states[-1] for states in ends.values()} <= {"trained", "discarded"}
