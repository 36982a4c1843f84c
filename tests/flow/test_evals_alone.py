"""A core that does not train: it plays its evals on the weights that the servers begin with, and ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.core import Core
from telescope.flow.replay import encode_line, encode_opening, replay
from telescope.flow.settings import EvalRules, FlowSettings
from telescope.records import EnvironmentCard, RolloutOrder
from tests.flow.harness import settings

MATH = EvalRules(name="math", environment="math", num_samples=2)
CARDS = (EnvironmentCard("math", {"train": 9, "eval": 3}, "d"),)


def alone(**changes: Any) -> FlowSettings:
    return settings(**{"trains": False, "number_of_steps": 20, "environments": (), "evals": (MATH,), **changes})


class Table:
    """A core, with a server and a worker that answer by hand."""

    def __init__(self, core: Core, cards: tuple[EnvironmentCard, ...] = CARDS) -> None:
        self.core = core
        self.said: list[Any] = []
        self.lines = [encode_opening(core.settings, core.saved)]
        self.tell(seen.ServerJoined("server-0", core.settings.number_of_steps, 100))
        self.tell(seen.WorkerJoined("worker-0", 100, cards))

    def tell(self, event: Any) -> list[Any]:
        answer = self.core.handle(event, 0.0)
        self.lines.append(encode_line(0.0, event, answer))
        self.said += answer
        return answer

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.said if isinstance(command, kind)]

    @property
    def orders(self) -> list[RolloutOrder]:
        return [command.order for command in self.of(do.DispatchRollout)]

    def score(self, order: RolloutOrder) -> None:
        self.tell(seen.RolloutDone(order.rollout_id, order.attempt, 1.0, 5, 5))


@pytest.mark.parametrize("step", [0, 20])
def test_its_evals_are_played_once_at_the_step_of_the_weights_and_it_ends(step: int):
    table = Table(Core(alone(number_of_steps=step)))
    begun = table.of(do.BeginEval)
    assert [(one.eval, one.step, one.prompts, one.samples) for one in begun] == [("math", step, 3, 2)]
    assert [(order.prompt.index, order.sample) for order in table.orders] == [(i, s) for i in range(3) for s in range(2)]
    for order in table.orders:
        assert table.of(do.EndRun) == []
        table.score(order)
    assert [(one.eval, one.step, one.state) for one in table.of(do.EndEval)] == [("math", step, "complete")]
    assert [(one.reason, one.ok) for one in table.of(do.EndRun)] == [("all evals are played", True)]
    assert not [kind for kind in (do.UpdateWeights, do.TrainOnBatch, do.TakeCheckpoint) if table.of(kind)]
    assert replay(table.lines).disagreement is None


def test_it_waits_for_no_trainer():
    table = Table(Core(alone()))
    table.core.handle(seen.Tick(), 10_000.0)
    assert table.core.ended is False


def test_from_a_snapshot_it_plays_what_is_left():
    first = Table(Core(alone()))
    taken = first.core.snapshot()
    ids = [order.rollout_id for order in first.orders]
    (one,) = taken.evals.rounds
    assert (one.scored, one.step, one.prompts) == ((), 20, 3)
    rounds = (msgspec.structs.replace(one, scored=(ids[0], ids[3])),)
    left = msgspec.structs.replace(taken, evals=msgspec.structs.replace(taken.evals, rounds=rounds))
    second = Table(Core.restore(alone(), left))
    assert [order.rollout_id for order in second.orders] == [ids[1], ids[2], ids[4], ids[5]]
    assert [order.seed for order in second.orders] == [first.orders[at].seed for at in (1, 2, 4, 5)]
    for order in second.orders:
        second.score(order)
    assert [one.state for one in second.of(do.EndEval)] == ["complete"]
    assert replay(second.lines).disagreement is None


def test_other_prompts_than_before_end_the_eval_as_changed():
    taken = Table(Core(alone())).core.snapshot()
    cards = (EnvironmentCard("math", {"train": 9, "eval": 3}, "other"),)
    table = Table(Core.restore(alone(), taken), cards)
    assert [one.state for one in table.of(do.EndEval)] == ["changed"]
    (end,) = table.of(do.EndRun)
    assert end.ok is False
    assert "the eval math has other settings or prompts than when it began" in end.reason


def test_an_eval_whose_samples_are_all_scored_ends_as_it_goes_on():
    taken = Table(Core(alone())).core.snapshot()
    (one,) = taken.evals.rounds
    rounds = (msgspec.structs.replace(one, scored=tuple(range(one.first_id, one.first_id + 6))),)
    table = Table(
        Core.restore(alone(), msgspec.structs.replace(taken, evals=msgspec.structs.replace(taken.evals, rounds=rounds)))
    )
    assert table.orders == []
    assert [(one.state, one.failed) for one in table.of(do.EndEval)] == [("complete", 0)]
    assert [one.ok for one in table.of(do.EndRun)] == [True]
    assert replay(table.lines).disagreement is None


def test_an_eval_that_is_added_is_begun():
    taken = Table(Core(alone())).core.snapshot()
    (one,) = taken.evals.rounds
    two = alone(evals=(MATH, EvalRules(name="more", environment="math")))
    for rounds in ((), (one,)):
        before = msgspec.structs.replace(taken, evals=msgspec.structs.replace(taken.evals, rounds=rounds))
        table = Table(Core.restore(two, before))
        assert [(one.eval, one.prompts) for one in table.of(do.BeginEval)] == [("more", 3)]
        for order in table.orders:
            assert table.of(do.EndRun) == []
            table.score(order)
        assert [one.state for one in table.of(do.EndEval)] == ["complete"] * (1 + len(rounds))
        assert [one.ok for one in table.of(do.EndRun)] == [True]
        assert replay(table.lines).disagreement is None


@pytest.mark.parametrize("changes", [{"evals": ()}, {"environments": (("math", 1.0),)}, {"checkpoint_every": 1}])
def test_what_only_training_has_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="plays evals alone"):
        alone(**changes)


def test_a_run_that_trains_has_a_step():
    with pytest.raises(ValueError, match="number_of_steps=0 must be at least 1"):
        settings(number_of_steps=0)
