"""How a model is cut into stages, and the order in which these compute rows: without ranks, torch and Megatron-Core."""

from __future__ import annotations

from collections import deque

import pytest

from telescope.backends.megatron.schedule import Task, forwards, one_forward_one_backward
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
    def said(tasks: list[Task]) -> str:
        return " ".join(f"{'B' if task.backward else 'F'}{task.row}" for task in tasks)

    assert said(one_forward_one_backward(4, 0, 3, 1)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert said(one_forward_one_backward(4, 1, 3, 1)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert said(one_forward_one_backward(4, 2, 3, 1)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert said(one_forward_one_backward(1, 0, 3, 1)) == "F0 B0", "fewer rows than stages"
    assert said(forwards(3, 2, 1)) == "F0 F1 F2"


def test_rows_go_round_in_groups_of_as_many_as_there_are_stages():
    assert [(task.row, task.lap) for task in forwards(3, 2, 2)] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("laps", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_no_stage_waits_for_ever_and_what_is_received_is_what_was_sent(stages: int, laps: int):
    """Also where a message is on its way at most on each link, and the next one waits until it is looked for, one task ahead:
    as with NCCL on a GPU whose queues are one."""
    for rows in (*range(1, 10), 17):
        orders = [one_forward_one_backward(rows, stage, stages, laps) for stage in range(stages)]
        for order in orders:
            assert len(order) == len(set(order)) == 2 * rows * laps
        run(orders, stages, laps)
        run([forwards(rows, stages, laps)] * stages, stages, laps)


def run(orders: list[list[Task]], stages: int, laps: int) -> None:
    """Fails where all stages wait, or one takes another message than it needs."""
    done, links = [0] * stages, dict[tuple[bool, int, int], deque[tuple[int, int]]]()

    def link(stage: int, task: Task, *, out: bool) -> tuple[deque[tuple[int, int]], tuple[int, int]] | None:
        """Of what a task receives or sends: the messages on that link, and this one: (row, stretch that takes it)."""
        place = task.lap * stages + stage
        other = place + (1 if out != task.backward else -1)
        if not 0 <= other < stages * laps:
            return None
        source, target = (place, other) if out else (other, place)
        return links.setdefault((task.backward, source % stages, target % stages), deque()), (task.row, target)

    def looked_for(queue: deque[tuple[int, int]]) -> bool:
        """Whether the one message on a link is received already: it is that of the next two tasks of its receiver."""
        row, target = queue[0]
        stage = target % stages
        near = orders[stage][done[stage] : done[stage] + 2]
        return any((found := link(stage, task, out=False)) and found[0] is queue and found[1] == (row, target) for task in near)

    def take(stage: int) -> bool:
        task = orders[stage][done[stage]]
        needed, given = link(stage, task, out=False), link(stage, task, out=True)
        if needed is not None and not needed[0]:
            return False
        if given is not None and given[0] and not (len(given[0]) == 1 and looked_for(given[0])):
            return False
        if needed is not None:
            assert needed[0].popleft() == needed[1]
        if given is not None:
            given[0].append(given[1])
        done[stage] += 1
        return True

    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        assert any(take(stage) for stage in range(stages) if done[stage] < len(orders[stage])), "all of them wait"
