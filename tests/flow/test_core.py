"""Single decisions of the core, driven by hand."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.core import Core
from telescope.flow.settings import FlowSettings
from telescope.records import EnvironmentCard
from tests.flow.harness import settings

CARDS = (EnvironmentCard("countdown", {"train": 1000}, "d"),)


class Desk:
    """A core with its commands sorted by kind."""

    def __init__(self, **changes: Any) -> None:
        self.core = Core(settings(**{"prompts_batch_size_for_trainer": 1, "group_size": 2, "max_async_rollout": 0, **changes}))
        self.said: list[Any] = []
        self.now = 0.0

    def tell(self, *events: Any) -> list[Any]:
        """The commands of the last event."""
        answer: list[Any] = []
        for event in events:
            answer = self.core.handle(event, self.now)
            self.said += answer
        return answer

    def open(self, capacity: int = 100, servers: int = 1) -> list[Any]:
        for server in range(servers):
            self.tell(seen.ServerJoined(f"server-{server}", 0, 1000))
        self.tell(seen.TrainerReady(1))
        return self.tell(seen.WorkerJoined("worker-0", capacity, CARDS))

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.said if isinstance(command, kind)]

    def rows(self, group_id: int) -> list[str]:
        return [row.state for row in self.of(do.RecordGroupState) if row.group_id == group_id]

    def done(self, rollout_id: int, reward: float, attempt: int = 0, tokens: int = 5) -> list[Any]:
        return self.tell(seen.RolloutDone(rollout_id, attempt, reward, 10, tokens))

    def failed(self, rollout_id: int, attempt: int = 0, cause: str = "the sandbox is down") -> list[Any]:
        return self.tell(seen.RolloutFailed(rollout_id, attempt, cause))

    def step(self, step: int) -> list[Any]:
        return self.tell(seen.StepDone(step), seen.UpdateDone(step))


def runs(commands: list[Any]) -> list[tuple[int, int]]:
    return [(c.order.rollout_id, c.order.attempt) for c in commands if isinstance(c, do.DispatchRollout)]


# ---- a group's life


def test_one_group_from_prompt_to_weights():
    desk = Desk(number_of_steps=1)
    assert runs(desk.open()) == [(0, 0), (1, 0)]
    assert desk.tell(seen.TurnStarted("r0", 0, 0, 0, 12))[0] == do.PlaceRequest("r0", "server-0", 0)
    desk.tell(seen.TurnDone("r0", 0, 5, "stop"))
    desk.done(0, 1.0)
    trained = desk.done(1, 0.0)
    assert do.TrainOnBatch(1, (0,), ((0, 1),), (), ()) in trained
    assert desk.tell(seen.StepDone(1)) == [do.UpdateWeights(1)]
    last = desk.tell(seen.UpdateDone(1))
    assert last[-1] == do.EndRun("all 1 steps are trained", ok=True)
    assert do.ForgetRollouts((0, 1)) in last
    way = ["pending", "queued", "generating", "env", "scoring", "complete", "kept", "batched", "trained"]
    assert desk.rows(0) == way
    assert desk.tell(seen.Tick()) == []


def test_nothing_runs_before_a_server_is_there():
    desk = Desk()
    assert runs(desk.tell(seen.WorkerJoined("worker-0", 9, CARDS))) == []
    assert runs(desk.tell(seen.ServerJoined("server-0", 0, 1000))) == [(0, 0), (1, 0)]


def test_a_batch_waits_for_the_trainer_and_its_groups_are_in_order_of_their_ids():
    desk = Desk(prompts_batch_size_for_trainer=2, group_size=2)
    desk.tell(seen.ServerJoined("server-0", 0, 1000), seen.WorkerJoined("worker-0", 9, CARDS))
    for rollout_id, reward in ((2, 1.0), (3, 0.0), (0, 1.0), (1, 0.0)):
        desk.done(rollout_id, reward)
    assert desk.of(do.TrainOnBatch) == []
    assert desk.tell(seen.TrainerReady(1)) == [do.TrainOnBatch(1, (0, 1), ((0, 1), (2, 3)), (), ())]


def test_equal_rewards_are_discarded_replaced_and_listed_as_baseline():
    desk = Desk()
    desk.open()
    desk.done(0, 0.5)
    assert runs(desk.done(1, 0.5)) == [(2, 0), (3, 0)]
    desk.done(2, 1.0)
    assert do.TrainOnBatch(1, (1,), ((2, 3),), (0,), ((0, 1),)) in desk.done(3, 0.0)
    assert do.ForgetRollouts((2, 3, 0, 1)) in desk.step(1)
    counts = desk.core.counts()
    assert (counts.rollouts_discarded, counts.rollouts_trained, counts.tokens_discarded) == (2, 2, 10)
    assert counts.reasons == {"discarded: zero_advantage": 1}


def test_equal_rewards_are_kept_where_discarding_is_off():
    desk = Desk(discard_group_zero_advantage=False)
    desk.open()
    desk.done(0, 0.5)
    assert do.TrainOnBatch(1, (0,), ((0, 1),), (), ()) in desk.done(1, 0.5)


def test_a_group_of_one_is_never_called_equal():
    desk = Desk(group_size=1)
    desk.open()
    assert do.TrainOnBatch(1, (0,), ((0,),), (), ()) in desk.done(0, 0.0)


# ---- failures


def test_a_failed_rollout_is_tried_again_with_its_id_and_seed_and_costs_itself_only():
    desk = Desk(group_size=3, max_attempts=2)
    desk.open()
    seed = next(run.order.seed for run in desk.of(do.DispatchRollout) if run.order.rollout_id == 1)
    again = desk.failed(1)
    assert runs(again) == [(1, 1)]
    assert again[0].order.seed == seed
    desk.failed(1, attempt=1)
    desk.done(0, 1.0)
    assert do.TrainOnBatch(1, (0,), ((0, 2),), (), ()) in desk.done(2, 0.0)
    desk.step(1)
    counts = desk.core.counts()
    assert (counts.rollouts_trained, counts.rollouts_failed, counts.rollouts_retried) == (2, 1, 1)


def test_a_group_without_enough_survivors_fails_with_its_cause_and_cancels_the_rest():
    desk = Desk(group_size=3, min_group_size=2, max_attempts=1)
    desk.open()
    desk.done(0, 1.0)
    desk.failed(1)
    said = desk.failed(2, cause="no disk left")
    assert do.RecordGroupState(0, "failed", "no disk left", 0) in said
    assert do.ForgetRollouts((0,)) in said
    assert runs(said) == [(3, 0), (4, 0), (5, 0)]


def test_a_failing_group_stops_at_the_failure_that_decides_it():
    desk = Desk(group_size=2, max_attempts=1)
    desk.open()
    said = desk.failed(0)
    assert do.CancelAttempt("worker-0", 1, 0, "its group is failed: the sandbox is down") in said


def test_an_environment_that_always_fails_ends_the_run_with_its_error():
    desk = Desk(prompts_batch_size_for_trainer=2, group_size=2, max_attempts=1, failed_batches_limit=2)
    desk.open()
    for group in range(4):
        desk.failed(2 * group)
    stop = desk.of(do.EndRun)
    sentence = "4 groups of environments.countdown failed in a row and none was completed; the last cause: the sandbox is down"
    assert stop == [do.EndRun(sentence, ok=False)]
    assert desk.said[-1] == stop[0]


def test_an_abort_by_a_weight_update_is_no_failure_of_the_rollout():
    desk = Desk(prompts_batch_size_for_trainer=1, group_size=2, max_async_rollout=1, max_attempts=1)
    desk.open()  # groups 0 and 1
    desk.tell(seen.TurnStarted("late", 2, 0, 0, 10))
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    desk.tell(seen.StepDone(1))  # the update travels
    desk.tell(seen.TurnDone("late", 2, 3, "abort"))
    assert runs(desk.failed(2)) == [(2, 1)]


def test_a_lost_workers_rollouts_go_back_first_in_line():
    desk = Desk(group_size=2, prompts_batch_size_for_trainer=2)
    desk.open(capacity=3)
    desk.tell(seen.WorkerLost("worker-0", "killed"))
    assert runs(desk.tell(seen.WorkerJoined("worker-1", 9, CARDS))) == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert desk.done(0, 1.0, attempt=0) == [do.IgnoreResult(0, 0)]


def test_a_reward_that_is_no_number_cannot_be_reported():
    with pytest.raises(ValueError, match="reward=nan of rollout 3 is not a finite number"):
        seen.RolloutDone(3, 0, float("nan"), 1, 1)


# ---- cancels, deadlines


def test_a_late_result_after_a_cancel_frees_the_lane_and_counts_for_nothing():
    desk = Desk(group_size=2, prompts_batch_size_for_trainer=1, max_attempts=1, max_concurrent_prompts_per_server=1)
    desk.open()
    assert runs(desk.failed(0)) == [(2, 0)]  # one lane of two is free; the cancelled rollout 1 holds the other
    late = desk.done(1, 1.0, tokens=7)
    assert late[0] == do.IgnoreResult(1, 0)
    assert runs(late) == [(3, 0)]
    assert desk.core.counts().results_ignored == 1


def test_a_request_of_a_cancelled_rollout_is_refused():
    desk = Desk(max_attempts=1)
    desk.open()
    desk.failed(0)
    assert desk.tell(seen.TurnStarted("r", 1, 0, 0, 5)) == [do.RefuseRequest("r", "its rollout does not count any more")]


def test_a_stale_incomplete_group_is_cancelled_whole_and_its_prompt_returns_once():
    desk = Desk(prompts_batch_size_for_trainer=1, group_size=2, max_async_rollout=1, max_off_policy_steps=1, number_of_steps=9)
    desk.open()  # groups 0, 1
    desk.done(0, 1.0)
    desk.done(2, 1.0, tokens=5)
    desk.done(3, 0.0)
    said = desk.step(1)  # trained on group 1; group 0 is one version old and has one sample of two
    assert do.RecordGroupState(0, "cancelled", "off_policy", 0) in said
    assert do.CancelAttempt("worker-0", 1, 0, "its group is cancelled: off_policy") in said
    assert do.ForgetRollouts((0,)) in said
    prompts = {run.order.group_id: run.order.prompt for run in desk.of(do.DispatchRollout)}
    assert prompts[2] == prompts[0]
    # group 2 has the prompt again; cancelled once more, the prompt is gone for this epoch
    desk.done(6, 1.0)
    desk.done(7, 0.0)
    assert do.RecordGroupState(2, "cancelled", "off_policy", 1) in desk.step(2)
    prompts = {run.order.group_id: run.order.prompt for run in desk.of(do.DispatchRollout)}
    assert list(prompts.values()).count(prompts[0]) == 2
    counts = desk.core.counts()
    assert (counts.reasons["cancelled: off_policy"], counts.tokens_lost) == (2, 5)


def test_tokens_of_what_is_alive_at_the_end_are_lost():
    desk = Desk(group_size=2, prompts_batch_size_for_trainer=2)
    desk.open()  # groups 0, 1
    desk.done(0, 1.0, tokens=5)
    desk.done(1, 0.0, tokens=6)  # group 0 is kept
    desk.done(2, 1.0, tokens=7)
    desk.tell(seen.TurnStarted("r", 3, 0, 0, 10), seen.TurnDone("r", 3, 8, "stop"))  # in flight, one turn through
    desk.tell(seen.StopRequested("interrupted by SIGINT", False))
    assert desk.core.counts().tokens_lost == 5 + 6 + 7 + 8


def test_a_complete_group_is_not_cancelled_however_old():
    desk = Desk(prompts_batch_size_for_trainer=2, group_size=1, max_async_rollout=1, max_off_policy_steps=1, number_of_steps=9)
    desk.open()  # groups 0 to 3
    for rollout_id in (1, 2, 3):
        desk.done(rollout_id, 1.0)
    said = desk.step(1)
    assert desk.rows(3)[-1] == "batched"
    assert do.RecordGroupState(0, "cancelled", "off_policy", 0) in said


def test_an_unanswered_rollout_is_cancelled_at_its_deadline_and_tried_again():
    desk = Desk(rollout_deadline_s=100.0)
    desk.open(capacity=3)
    desk.now = 99.0
    assert desk.tell(seen.Tick()) == []
    desk.now = 100.0
    said = desk.tell(seen.Tick())
    assert said[0] == do.CancelAttempt("worker-0", 0, 0, "no answer from worker-0 within 100 s")
    assert runs(said) == [(0, 1)]  # three credits: two cancelled orders hold theirs
    assert runs(desk.failed(0)) == [(1, 1)]


def test_an_unanswered_cancel_is_repeated_at_half_its_time():
    desk = Desk(max_attempts=1, cancel_deadline_s=30.0)
    desk.open()
    desk.failed(0)
    desk.now = 15.0
    assert desk.tell(seen.Tick()) == [do.CancelAttempt("worker-0", 1, 0, "asked again")]
    assert desk.tell(seen.Tick()) == []


def test_a_worker_that_does_not_answer_a_cancel_ends_the_run():
    desk = Desk(rollout_deadline_s=100.0, cancel_deadline_s=30.0)
    desk.open()
    desk.now = 100.0
    desk.tell(seen.Tick())
    desk.now = 130.0
    stop = desk.tell(seen.Tick())[-1]
    assert stop.reason == (
        "worker-0 did not answer the cancel of rollout 0 within 30 s: it hangs, or a server that generates for it does; "
        "see their logs"
    )
    assert not stop.ok


def test_a_role_that_nobody_fills_ends_the_run():
    desk = Desk(absence_deadline_s=60.0)
    desk.tell(seen.WorkerJoined("worker-0", 9, CARDS), seen.TrainerReady(1), seen.Tick())
    desk.now = 60.0
    assert desk.tell(seen.Tick())[-1] == do.EndRun(
        "no inference server for 60 s: see the logs of the run for why none is there", False
    )


# ---- lanes and placement


def test_sample_lanes_are_prompts_times_group_size_for_each_server():
    desk = Desk(prompts_batch_size_for_trainer=9, group_size=2, max_concurrent_prompts_per_server=2)
    assert len(runs(desk.open())) == 4
    assert len(runs(desk.tell(seen.ServerJoined("server-1", 0, 1000)))) == 4
    assert runs(desk.done(0, 1.0)) == [(8, 0)]


def test_a_group_lane_is_free_when_the_whole_group_is_through():
    desk = Desk(
        prompts_batch_size_for_trainer=9,
        group_size=2,
        max_concurrent_prompts_per_server=2,
        enable_individual_sample_lanes=False,
    )
    assert runs(desk.open()) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert runs(desk.done(0, 1.0)) == []
    assert runs(desk.done(1, 0.0)) == [(4, 0), (5, 0)]


def test_rollouts_go_to_the_worker_with_most_free_credits():
    desk = Desk(prompts_batch_size_for_trainer=2, group_size=2)
    desk.tell(seen.WorkerJoined("worker-0", 2, CARDS), seen.WorkerJoined("worker-1", 3, CARDS))
    said = desk.tell(seen.ServerJoined("server-0", 0, 1000))
    assert [command.worker for command in said if isinstance(command, do.DispatchRollout)] == [
        "worker-1",
        "worker-0",
        "worker-1",
        "worker-0",
    ]


def test_siblings_share_a_server_and_groups_spread_by_tokens_in_flight():
    desk = Desk(prompts_batch_size_for_trainer=3, group_size=2)
    desk.open(servers=2)
    for rollout_id, tokens in ((0, 100), (2, 10), (4, 10), (1, 100), (5, 10)):
        desk.tell(seen.TurnStarted(f"r{rollout_id}", rollout_id, 0, 0, tokens))
    placed = {place.request_id: place.server for place in desk.of(do.PlaceRequest)}
    assert placed == {"r0": "server-0", "r2": "server-1", "r4": "server-1", "r1": "server-0", "r5": "server-1"}


def test_earlier_turns_go_first():
    desk = Desk()
    desk.open()
    desk.tell(seen.TurnStarted("late", 0, 0, 3, 5), seen.TurnStarted("early", 1, 0, 0, 5))
    late, early = desk.of(do.PlaceRequest)
    assert (late.priority, early.priority) == (3, 0)


def test_a_lost_servers_requests_are_placed_again_and_no_attempt_is_spent():
    desk = Desk()
    desk.open(servers=2)
    desk.tell(seen.TurnStarted("r0", 0, 0, 0, 5))
    assert desk.tell(seen.ServerLost("server-0", "killed")) == [do.PlaceRequest("r0", "server-1", 0)]
    desk.tell(seen.TurnDone("r0", 0, 7, "stop"))
    desk.done(0, 1.0, tokens=7)
    assert desk.core.counts().rollouts_retried == 0
    assert desk.tell(seen.TurnStarted("r1", 1, 0, 0, 5)) == [do.PlaceRequest("r1", "server-1", 0)]


def test_an_attempt_that_fails_with_its_server_counts_as_no_failure():
    desk = Desk(max_attempts=1)
    desk.open(servers=2)
    desk.tell(seen.TurnStarted("r0", 0, 0, 0, 5), seen.ServerLost("server-0", "killed"))
    assert runs(desk.failed(0, cause="server-0 was lost")) == [(0, 1)]
    assert desk.core.counts().rollouts_failed == 0


def test_a_request_that_always_fails_slowly_is_not_excused_for_ever():
    """Each try outlasts a version and ends with an abort that no update asked for."""
    desk = Desk(prompts_batch_size_for_trainer=1, group_size=2, max_async_rollout=3, max_attempts=2, max_off_policy_steps=3)
    desk.open(servers=2)
    attempt = 0
    for number in range(40):
        desk.tell(seen.TurnStarted(f"r{number}", 0, attempt, 0, 10), seen.ServerLost(f"server-{number % 2}", "killed"))
        desk.tell(seen.ServerJoined(f"server-{number % 2}", 0, 1000))
        desk.tell(seen.TurnDone(f"r{number}", 0, 3, "abort"))
        if (0, attempt + 1) not in runs(desk.failed(0, attempt, cause="too slow")):
            break
        attempt += 1
    assert attempt == 6  # 3 + 2 excused, and one of the two that count was tried again
    assert desk.rows(0)[-1] == "failed"


def test_a_failure_after_a_lost_servers_request_was_answered_elsewhere_counts():
    desk = Desk(max_attempts=1)
    desk.open(servers=2)
    desk.tell(seen.TurnStarted("r0", 0, 0, 0, 5), seen.ServerLost("server-0", "killed"))
    desk.tell(seen.TurnDone("r0", 0, 7, "stop"))
    assert runs(desk.failed(0, cause="the reward raised")) == [(2, 0), (3, 0)]  # a new group's: this one is given up
    assert desk.rows(0)[-1] == "failed"


def test_requests_of_the_only_server_wait_for_its_return_at_their_version():
    desk = Desk()
    desk.open()
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    desk.step(1)
    desk.tell(seen.TurnStarted("r", 2, 0, 0, 5))
    assert desk.tell(seen.ServerLost("server-0", "killed")) == []
    assert desk.tell(seen.ServerJoined("server-0", 0, 1000)) == [do.UpdateWeights(1)]
    assert desk.tell(seen.UpdateDone(1)) == [do.PlaceRequest("r", "server-0", 0)]


def test_a_lost_servers_request_of_a_cancelled_rollout_is_refused():
    desk = Desk(max_async_rollout=4, max_off_policy_steps=1)
    desk.open(servers=2)
    desk.tell(seen.TurnStarted("r", 2, 0, 0, 5))
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    desk.step(1)  # the second group was begun a version ago: it is cancelled, and its request is at server-0 still
    assert desk.of(do.CancelAttempt)
    assert desk.tell(seen.ServerLost("server-0", "killed")) == [do.RefuseRequest("r", "server-0 was lost: killed")]


@pytest.mark.parametrize("while_training", [True, False])
def test_a_late_server_gets_the_version_at_once_unless_the_trainer_itself_must_send(while_training: bool):
    desk = Desk(max_async_rollout=2, weights_while_training=while_training)
    desk.open()
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    desk.step(1)
    desk.done(2, 1.0)
    assert [command.step for command in desk.done(3, 0.0) if isinstance(command, do.TrainOnBatch)] == [2]
    joined = desk.tell(seen.ServerJoined("server-1", 0, 1000))
    assert [command for command in joined if isinstance(command, do.UpdateWeights)] == (
        [do.UpdateWeights(1)] if while_training else []
    )
    if while_training:
        desk.tell(seen.UpdateDone(1))
    assert do.UpdateWeights(2) in desk.tell(seen.StepDone(2))  # which brings up both


def test_the_trainer_gets_no_step_while_it_sends_to_a_late_server():
    desk = Desk(max_async_rollout=2, weights_while_training=False)
    desk.open()
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    desk.step(1)
    assert do.UpdateWeights(1) in desk.tell(seen.ServerJoined("server-1", 0, 1000))
    desk.done(2, 1.0)
    assert not [command for command in desk.done(3, 0.0) if isinstance(command, do.TrainOnBatch)]
    assert [command.step for command in desk.tell(seen.UpdateDone(1)) if isinstance(command, do.TrainOnBatch)] == [2]


def test_a_group_never_goes_to_a_server_older_than_itself():
    desk = Desk(prompts_batch_size_for_trainer=1, group_size=2)
    desk.open()
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    desk.step(1)
    desk.tell(seen.ServerLost("server-0", "killed"))
    assert desk.tell(seen.ServerJoined("server-1", 0, 1000)) == [do.UpdateWeights(1)]
    assert desk.tell(seen.TurnStarted("r", 2, 0, 0, 5)) == []
    assert desk.tell(seen.UpdateDone(1)) == [do.PlaceRequest("r", "server-1", 0), do.RecordGroupState(1, "generating", "", 1)]


def test_a_repeated_request_is_placed_once():
    desk = Desk()
    desk.open()
    desk.tell(seen.TurnStarted("r", 0, 0, 0, 5))
    assert desk.tell(seen.TurnStarted("r", 0, 0, 0, 5)) == []


# ---- what the parts must agree in


def test_workers_that_load_different_prompts_are_refused():
    desk = Desk()
    desk.open()
    stop = desk.tell(seen.WorkerJoined("worker-1", 9, (EnvironmentCard("countdown", {"train": 1000}, "e"),)))[-1]
    assert "environments.countdown differs between worker-0 (digest d) and worker-1 (digest e)" in stop.reason


def test_a_missing_or_empty_environment_is_refused():
    stop = Desk().tell(seen.WorkerJoined("worker-0", 9, ()))[-1]
    assert stop.reason == "worker-0 did not load environments.countdown: it reports none"
    stop = Desk().tell(seen.WorkerJoined("worker-0", 9, (EnvironmentCard("countdown", {"eval": 3}, "d"),)))[-1]
    assert stop.reason == "environments.countdown has no prompt in its split 'train': there is nothing to draw"


def test_a_failed_update_ends_the_run():
    desk = Desk()
    desk.open()
    desk.done(0, 1.0)
    desk.done(1, 0.0)
    stop = desk.tell(seen.StepDone(1), seen.UpdateFailed(1, "server-0 answered nothing for 300 s"))[-1]
    assert stop == do.EndRun("weights of version 1 did not reach the servers: server-0 answered nothing for 300 s", ok=False)


def test_a_stop_accounts_for_every_group_alive():
    desk = Desk(prompts_batch_size_for_trainer=2)
    desk.open()
    said = desk.tell(seen.StopRequested("interrupted by SIGINT", ok=False))
    assert said == [
        do.RecordGroupState(0, "cancelled", "the run ended", 0),
        do.RecordGroupState(1, "cancelled", "the run ended", 0),
        do.EndRun("interrupted by SIGINT", ok=False),
    ]
    assert desk.core.counts().rollouts_cancelled == 4


def test_settings_that_make_no_sense_are_refused_in_words():
    good: dict[str, Any] = {"number_of_steps": 1, "environments": (("a", 1.0),)}
    for change, sentence in (
        ({"number_of_steps": 0}, "number_of_steps=0 must be at least 1"),
        ({"max_async_rollout": -1}, "max_async_rollout=-1 must be 0"),
        ({"group_size": 3, "min_group_size": 4}, "min_group_size=4 is above group_size=3"),
        ({"environments": ()}, "name at least one environment"),
        ({"environments": (("a", 0.0),)}, "environments.a.weight=0.0 must be a finite number above 0"),
        ({"environments": (("a", 1.0), ("a", 1.0))}, "name one label twice"),
        ({"rollout_deadline_s": 0.0}, "rollout_deadline_s=0.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            FlowSettings(**{**good, **change})


def test_the_worked_example_of_the_docs():
    desk = Desk(prompts_batch_size_for_trainer=2, group_size=1, max_async_rollout=1, max_off_policy_steps=2, number_of_steps=9)

    def alive() -> list[int]:
        ended = ("trained", "discarded", "cancelled", "failed")
        return sorted(
            {row.group_id for row in desk.of(do.RecordGroupState)}
            - {r.group_id for r in desk.of(do.RecordGroupState) if r.state in ended}
        )

    desk.open()
    assert alive() == [0, 1, 2, 3]
    desk.done(1, 1.0)
    assert desk.done(2, 1.0)[-1] == do.TrainOnBatch(1, (1, 2), ((1,), (2,)), (), ())
    assert alive() == [0, 1, 2, 3]
    desk.done(3, 1.0)
    desk.step(1)
    assert alive() == [0, 3, 4, 5]
    assert desk.done(4, 1.0)[-1] == do.TrainOnBatch(2, (3, 4), ((3,), (4,)), (), ())
    assert do.RecordGroupState(0, "cancelled", "off_policy", 0) in desk.step(2)
    assert alive() == [5, 6, 7, 8]
    assert desk.core.counts().ages == {"0": 3, "1": 1}
    prompts = {run.order.group_id: run.order.prompt for run in desk.of(do.DispatchRollout)}
    assert prompts[0] in (prompts[6], prompts[7], prompts[8])


# ---- a server's room


def turn(request_id: str, rollout_id: int, attempt: int = 0) -> seen.TurnStarted:
    return seen.TurnStarted(request_id, rollout_id, attempt, 0, 12)


def placed(commands: list[Any]) -> list[tuple[str, str]]:
    return [(c.request_id, c.server) for c in commands if isinstance(c, do.PlaceRequest)]


def with_room_for(*capacities: int) -> Desk:
    desk = Desk(group_size=4)
    desk.tell(*(seen.ServerJoined(f"server-{i}", 0, capacity) for i, capacity in enumerate(capacities)))
    desk.tell(seen.TrainerReady(1), seen.WorkerJoined("worker-0", 100, CARDS))
    return desk


def test_a_full_server_is_passed_over_even_by_its_own_group():
    desk = with_room_for(1, 2)
    where = [placed(desk.tell(turn(f"r{i}", i))) for i in range(4)]
    assert where == [[("r0", "server-0")], [("r1", "server-1")], [("r2", "server-1")], []]
    assert placed(desk.tell(seen.TurnDone("r1", 1, 5, "stop"))) == [("r3", "server-1")]


def test_a_timed_out_rollout_keeps_its_place_at_the_server_until_that_has_answered():
    desk = with_room_for(1)
    desk.tell(turn("r0", 0))
    assert runs(desk.failed(0, cause="rollout.timeout_s ran out")) == [(0, 1)]
    assert desk.of(do.RefuseRequest) == []  # the server will answer it
    assert placed(desk.tell(turn("r0b", 0, 1))) == []
    assert placed(desk.tell(seen.TurnDone("r0", 0, 3, "abort"))) == [("r0b", "server-0")]


def test_a_request_that_waits_for_room_is_refused_when_its_rollout_ends():
    desk = with_room_for(1)
    desk.tell(turn("r0", 0), turn("r1", 1))
    assert do.RefuseRequest("r1", "its rollout has ended") in desk.failed(1)
    assert placed(desk.tell(seen.TurnDone("r0", 0, 3, "stop"))) == []


def test_an_id_used_twice_by_a_rollout_is_refused():
    desk = with_room_for(1)
    desk.tell(turn("r0", 0))
    assert desk.tell(turn("r0", 0)) == []
    desk.tell(seen.TurnDone("r0", 0, 3, "stop"))
    assert desk.tell(turn("r0", 0)) == [do.RefuseRequest("r0", "a request of this id was answered before")]


# ---- whose failure it is


@pytest.mark.parametrize("kind", ["grader", "prompt"])
def test_a_graders_or_a_prompts_failure_costs_its_sample_and_no_second_try(kind):
    desk = Desk(group_size=4, max_attempts=3)
    desk.open()
    for rollout_id in (0, 1):
        answer = desk.tell(seen.RolloutFailed(rollout_id, 0, "KeyError: 'gold'", kind))
        assert runs(answer) == []
    desk.done(2, 1.0)
    trained = desk.done(3, 0.0)
    assert do.TrainOnBatch(1, (0,), ((2, 3),), (), ()) in trained
    counts = desk.core.counts()
    assert (counts.rollouts_retried, counts.failures) == (0, {kind: 2})
    desk.step(1)
    assert desk.core.counts().rollouts_failed == 2


def test_a_group_that_the_grader_leaves_with_one_sample_fails_with_its_cause():
    desk = Desk(group_size=2)
    desk.open()
    answer = desk.tell(seen.RolloutFailed(0, 0, "KeyError: 'gold'", "grader"))
    assert [(row.state, row.reason) for row in answer if isinstance(row, do.RecordGroupState) and row.group_id == 0] == [
        ("failed", "KeyError: 'gold'")
    ]


def test_the_pause_before_another_try_doubles_and_siblings_do_not_wait():
    desk = Desk(group_size=2, max_attempts=4, retry_backoff_s=2.0)
    desk.open()
    for attempt, pause_s in ((0, 2.0), (1, 4.0), (2, 8.0)):
        assert runs(desk.failed(0, attempt)) == []
        began = desk.now
        desk.now = began + pause_s - 0.01
        assert runs(desk.tell(seen.Tick())) == []
        desk.now = began + pause_s
        assert runs(desk.tell(seen.Tick())) == [(0, attempt + 1)]
    assert desk.core.counts().failures == {"infrastructure": 3}


def test_no_pause_is_longer_than_a_minute():
    desk = Desk(group_size=2, max_attempts=9, retry_backoff_s=60.0)
    desk.open()
    for attempt in range(3):
        desk.failed(0, attempt)
        desk.now += 60.0
        assert runs(desk.tell(seen.Tick())) == [(0, attempt + 1)]


def test_a_retired_groups_resting_sample_is_not_woken():
    desk = Desk(group_size=3, max_attempts=2, retry_backoff_s=5.0)
    desk.open()
    desk.failed(0)
    assert desk.core.counts().rollouts_waiting == 1
    for rollout_id in (1, 2):  # the grader leaves one sample: too few
        desk.tell(seen.RolloutFailed(rollout_id, 0, "broken", "grader"))
    assert desk.rows(0)[-1] == "failed"
    desk.now = 100.0
    assert not [rollout for rollout in runs(desk.tell(seen.Tick())) if rollout[0] < 3]
