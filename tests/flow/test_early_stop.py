"""`eval.stop_after`: a run ends after so many evals without a gain, saved, with its final evals, and as one that is done."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.early_stop import EarlyStop, SavedEarlyStop
from telescope.flow.replay import replay
from telescope.flow.settings import EvalRules
from tests.flow.harness import Manners, World, settings

OWN = EvalRules(name="own", environment="countdown", every=1, num_samples=1)
SCORES = {0: 0.1, 1: 0.3, 2: 0.2, 3: 0.3, 4: 0.9}


def case(**changes: Any) -> Any:
    defaults = {"number_of_steps": 9, "evals": (OWN,), "stop_after": 2, "stop_measure": "the reward of own"}
    return settings(**{**defaults, **changes})


class Scored(World):
    """Each eval that ends is given the score of its step."""

    def _perform(self, command: Any) -> None:
        super()._perform(command)
        if isinstance(command, do.EndEval) and command.state == "complete":
            score = SCORES.get(command.step, 0.0)
            self.after(0.0, lambda: self.tell(seen.EvalScored(command.eval, command.step, score)))


def note(early: EarlyStop, *scores: float) -> EarlyStop:
    for step, score in enumerate(scores):
        early.note(seen.EvalScored("own", step, score), step + 3)
    return early


def test_evals_without_a_gain_are_counted_in_a_row():
    assert note(EarlyStop(case()), 0.1, 0.3, 0.2, 0.4, 0.3).state == SavedEarlyStop(
        measure="the reward of own", best=0.4, best_step=3, without_gain=1
    )
    early = note(EarlyStop(case()), 0.1, 0.3, 0.2, 0.3)
    assert (early.state.without_gain, early.last_step) == (2, 6), "an equal score is not a gain"
    assert early.sentence == (
        "the reward of own has not gained in 2 evals since step 1 (0.3): the run ends with step 6 of 9 (eval.stop_after=2)"
    )


def test_a_lower_score_gains_where_the_measure_says_so():
    early = note(EarlyStop(case(stop_lower=True)), 0.5, 0.4, 0.3, 0.2)
    assert (early.state.best, early.state.without_gain, early.last_step) == (0.2, 0, 9)


def test_at_the_last_step_there_is_nothing_left_to_end_early():
    assert note(EarlyStop(case(number_of_steps=5)), 0.3, 0.2, 0.2, 0.1).sentence == ""


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize("eval_servers", [0, 1])
def test_the_run_ends_saved_with_its_final_evals_and_as_done(lanes: bool, eval_servers: int):
    flow = case(number_of_steps=20, checkpoint_every=4, enable_individual_sample_lanes=lanes, eval_servers=eval_servers)
    for seed in range(4):
        world = Scored(flow, Manners(eval_prompts=1, servers=3), seed, journal=True).run()
        assert world.stop is not None
        assert world.stop.ok, world.stop.reason
        last = world.core.version
        assert world.stop.reason.endswith(f"the run ends with step {last} of 20 (eval.stop_after=2)")
        assert world.stop.checkpoint == last < 20
        ended = {one.step: one.state for one in world.said if isinstance(one, do.EndEval)}
        assert ended[last] == "complete"
        assert replay(world.lines).disagreement is None


def stopped(seed: int = 1) -> World:
    return Scored(case(checkpoint_every=1), Manners(eval_prompts=1), seed, journal=True).run()


def test_a_run_that_ended_early_goes_on_only_with_another_limit():
    world = stopped()
    last = world.checkpoints[-1].snapshot
    finished = msgspec.structs.replace(last, evals=msgspec.structs.replace(last.evals, rounds=()))
    with pytest.raises(ValueError, match=r"eval.stop_after=2\): set eval.stop_after=null to train on, or to more"):
        World(case(checkpoint_every=1), resumed=finished)
    on = World(case(checkpoint_every=1, stop_after=0), Manners(eval_prompts=1), 5, resumed=finished).run()
    assert on.stop is not None
    assert on.stop.reason == "all 9 steps are trained"


def test_a_run_killed_in_its_final_evals_plays_them_and_trains_no_more():
    world = stopped()
    snapshot = world.checkpoints[-1].snapshot
    assert snapshot.evals.rounds, "saved before its final eval had ended"
    again = World(case(checkpoint_every=1), Manners(eval_prompts=1), 6, journal=True, resumed=snapshot)
    again.run()
    assert again.stop is not None
    assert again.stop.ok
    assert again.stop.reason == world.stop.reason  # type: ignore[union-attr]
    assert not any(isinstance(command, do.TrainOnBatch) for command in again.said)
    assert replay(again.lines).disagreement is None


def test_the_count_survives_a_resume():
    world = Scored(case(checkpoint_every=1, stop_after=4), Manners(eval_prompts=1), 2)
    world.run(killed_after=1_000_000)
    saved = [one.snapshot.early_stop for one in world.checkpoints]
    assert saved[-1].without_gain > 0
    early = EarlyStop(case(stop_after=9))
    early.restore(saved[-1])
    assert early.state.without_gain == saved[-1].without_gain


@pytest.mark.parametrize("changed", [{"stop_measure": "the reward of other"}, {"stop_lower": True}, {"stop_after": 0}])
def test_scores_by_another_measure_are_compared_with_none_after_a_resume(changed: dict[str, Any]):
    """Nor are those from before a time without a limit, in which nobody has counted."""
    before = note(EarlyStop(case()), 0.9, 0.8, 0.7)
    assert before.last_step < 9
    early = EarlyStop(case(**changed))
    early.restore(before.state)
    assert (early.state.best, early.state.without_gain, early.last_step) == (None, 0, 9)
    again = EarlyStop(case())
    again.restore(early.state)
    assert note(again, 0.1, 0.2).state == SavedEarlyStop(measure="the reward of own", best=0.2, best_step=1)


def test_a_run_that_ended_early_trains_on_by_another_measure():
    last = stopped().checkpoints[-1].snapshot
    finished = msgspec.structs.replace(last, evals=msgspec.structs.replace(last.evals, rounds=()))
    on = World(case(checkpoint_every=1, stop_measure="pass@1 of own"), Manners(eval_prompts=1), 5, resumed=finished).run()
    assert on.stop is not None
    assert on.stop.reason == "all 9 steps are trained"
