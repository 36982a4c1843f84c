"""How a model is cut into stages, and the order in which these compute rows: without ranks, torch and Megatron-Core."""

from __future__ import annotations

import pytest

from telescope.backends.megatron.pipeline_order import StagePass, forwards, one_forward_one_backward, receives
from telescope.backends.megatron.stages import cut_layers


def layers(count: int, stages: int, stretches: int = 1, head: float = 0.0) -> str:
    return cut_layers(count, stages, stretches, head=head, tied=False).described()


@pytest.mark.parametrize(
    ("count", "stages", "stretches", "head", "expected"),
    [
        (8, 4, 1, 0.0, "2, 2, 2, 2"),
        (5, 4, 1, 0.4, "1, 1, 2, 1"),
        (28, 2, 1, 9.9, "19, 9"),  # Qwen3-0.6B: its head has as many numbers as 9.9 layers
        (36, 4, 1, 3.9, "10, 10, 10, 6"),  # Qwen3-4B
        (9, 4, 2, 0.3, "1+1, 1+1, 1+2, 1+1"),
        (28, 2, 4, 9.9, "4+5+5+5, 2+3+3+1"),
        (3, 1, 1, 5.0, "3"),
    ],
)
def test_stages_have_about_as_much_to_compute(count: int, stages: int, stretches: int, head: float, expected: str):
    assert layers(count, stages, stretches, head) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_all_layers_are_somewhere_once_and_parameters_have_the_names_of_the_whole_model(tied: bool):
    layout = cut_layers(11, 3, 2, head=2.5, tied=tied)
    assert [each.first + place for each in layout.stretches for place in range(each.layers)] == list(range(11))
    assert [each.begins for each in layout.stretches] == [True, *[False] * 5]
    assert [each.ends for each in layout.stretches] == [*[False] * 5, True]
    for stage in range(3):
        for stretch in layout.of(stage):
            name = layout.name(stretch, "decoder.layers.0.mlp.linear_fc1.weight")
            assert name == f"decoder.layers.{stretch.first}.mlp.linear_fc1.weight"
            assert layout.home(name) == stage
    assert layout.home("embedding.word_embeddings.weight") == 0
    assert layout.home("decoder.final_layernorm.weight") == layout.home("output_layer.weight") == 2
    copied = layout.name(layout.stretches[-1], "output_layer.weight")
    assert copied == ("embedding.word_embeddings.weight" if tied else "output_layer.weight")


def test_a_stretch_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="7 layers can't be cut into 8 stretches"):
        cut_layers(7, 4, 2, head=0.1, tied=True)


def test_stages_take_one_row_forward_and_one_backward_in_turn():
    def said(tasks: list[StagePass]) -> str:
        return " ".join(f"{'B' if task.backward else 'F'}{task.row}" for task in tasks)

    assert said(one_forward_one_backward(4, 0, 3, 1)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert said(one_forward_one_backward(4, 1, 3, 1)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert said(one_forward_one_backward(4, 2, 3, 1)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert said(one_forward_one_backward(1, 0, 3, 1)) == "F0 B0", "fewer rows than stages"
    assert said(forwards(3, 2, 1)) == "F0 F1 F2"


def test_rows_go_round_in_groups_of_as_many_as_there_are_stages():
    assert [(task.row, task.lap) for task in forwards(3, 2, 2)] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("laps", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
def test_no_stage_waits_for_ever_though_every_task_waits_for_all_that_is_begun(stages: int, laps: int):
    """Sends and receives, each of which ends once both sides have begun it: what a cudaFree within each task would do."""
    for rows in range(1, 18):
        orders = [one_forward_one_backward(rows, stage, stages, laps) for stage in range(stages)]
        for order in orders:
            assert len(order) == len(set(order)) == 2 * rows * laps
        assert keeps(orders, laps, [receives(orders, stage, laps) for stage in range(stages)])
        alone = [forwards(rows, stages, laps)] * stages
        assert keeps(alone, laps, [receives(alone, stage, laps) for stage in range(stages)])


@pytest.mark.parametrize(("laps", "rows"), [(1, 1), (1, 8), (2, 3), (2, 8)])
def test_neighbours_that_begin_to_receive_one_task_ahead_can_wait_for_each_other(laps: int, rows: int):
    orders = [one_forward_one_backward(rows, stage, 2, laps) for stage in range(2)]

    def ahead(stage: int) -> list[list[StagePass]]:
        needing = [[task] if link(task, stage, 2, laps, out=False) else [] for task in orders[stage]]
        return [needing[0] + needing[1], *needing[2:], [], []]

    assert not keeps(orders, laps, [ahead(stage) for stage in range(2)])


@pytest.mark.parametrize(("laps", "most"), [(1, 2), (2, 4), (4, 4)])
def test_few_messages_wait_in_memory(laps: int, most: int):
    """Begun and not yet taken, on the stage that has most."""
    found = 0
    for stages in (2, 4, 6):
        orders = [one_forward_one_backward(24, stage, stages, laps) for stage in range(stages)]
        for stage in range(stages):
            first, *after = receives(orders, stage, laps)
            begun = set(first)
            for task, coming in zip(orders[stage], after, strict=True):
                found = max(found, len(begun))
                begun = begun - {task} | set(coming)
    assert found == most


def test_orders_that_no_stage_can_begin_are_refused():
    with pytest.raises(ValueError, match="can't be kept"):
        receives([[StagePass(True, 0, 0), StagePass(False, 0, 0)], [StagePass(False, 0, 0), StagePass(True, 0, 0)]], 0, 1)


def link(task: StagePass, stage: int, stages: int, laps: int, *, out: bool) -> tuple[int, StagePass] | None:
    """The task and its stage that take what this one sends, or send what it needs."""
    place = task.lap * stages + stage + (1 if out != task.backward else -1)
    return (place % stages, StagePass(task.backward, task.row, place // stages)) if 0 <= place < stages * laps else None


def keeps(orders: list[list[StagePass]], laps: int, begins: list[list[list[StagePass]]]) -> bool:
    """Whether all stages come to their end, where each one's `begins` are the tasks whose messages it begins to receive, first
    and after each task. Fails where two messages of a link are received in another order than they are sent."""
    stages = len(orders)
    done = [0] * stages
    sent, begun = set[tuple[int, StagePass]](), {(stage, task) for stage in range(stages) for task in begins[stage][0]}
    """By who takes it."""
    open_of = [{each for each in begun if each[0] == stage} for stage in range(stages)]
    given, taken = dict[tuple[bool, int, int], list[StagePass]](), dict[tuple[bool, int, int], list[StagePass]]()

    def receive(stage: int, task: StagePass) -> None:
        source = link(task, stage, stages, laps, out=False)
        assert source is not None
        taken.setdefault((task.backward, source[0], stage), []).append(task)

    def take(stage: int) -> bool:
        task = orders[stage][done[stage]]
        if any(each not in sent or each not in begun for each in open_of[stage]):
            return False
        if link(task, stage, stages, laps, out=False) is not None:
            assert (stage, task) in begun, "it is received before it is needed"
        open_of[stage].clear()
        if (target := link(task, stage, stages, laps, out=True)) is not None:
            sent.add(target)
            open_of[stage].add(target)
            given.setdefault((task.backward, stage, target[0]), []).append(target[1])
        done[stage] += 1
        for coming in begins[stage][done[stage]]:
            begun.add((stage, coming))
            open_of[stage].add((stage, coming))
            receive(stage, coming)
        return True

    for stage in range(stages):
        for coming in begins[stage][0]:
            receive(stage, coming)
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        if not any(take(stage) for stage in range(stages) if done[stage] < len(orders[stage])):
            return False
    assert given == taken
    return True
