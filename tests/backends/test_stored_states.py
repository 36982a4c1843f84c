"""States that are kept otherwise between updates than a step needs them: moments in bfloat16, and weights in host memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from telescope.backends.common import stored_states
from telescope.backends.common.staging import pin
from telescope.backends.common.stored_states import Home, StoredStates

BETAS = (0.9, 0.95)
HALF = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
SIZES = (400, 7, 90, 250)
"""Of which the second and third come together where 1,000 bytes may, and the first alone."""


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_states, "AT_ONCE_BYTES", 1000)


def weights() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=random)) for size in SIZES]


def gradients(step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=random) * 10.0 ** -(step % 3) for size in SIZES]


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=BETAS, weight_decay=0.1, fused=True)


def by_torch(dtypes: dict[str, torch.dtype], steps: int = 5) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """All parameters at once, by torch alone; after each step moments are rounded where they lie."""
    parameters = weights()
    optimizer = optimizer_of(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for state in optimizer.state.values():
            for kind, dtype in dtypes.items():
                state[kind].copy_(state[kind].to(dtype))
    return parameters, optimizer


def by_pieces(
    dtypes: dict[str, torch.dtype], hosted: Sequence[int] = (), steps: int = 5
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """`hosted`: places of the weights that are kept elsewhere, with their moments."""
    parameters = weights()
    optimizer, away = optimizer_of(parameters), [parameters[place] for place in hosted]
    homes = {id(parameter) for parameter in away}
    states = StoredStates(
        optimizer, "cpu", lambda parameter, kind: Home(on_host=id(parameter) in homes, dtype=dtypes.get(kind)), away
    )
    for step in range(steps):
        states.step_with(list(zip(parameters, gradients(step), strict=True)))
    return parameters, optimizer


def same(left: Sequence[nn.Parameter], right: Sequence[nn.Parameter]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(left, right, strict=True))


@pytest.mark.parametrize("dtypes", [{}, HALF, {"exp_avg": torch.bfloat16}, {"exp_avg_sq": torch.bfloat16}])
@pytest.mark.parametrize("hosted", [(), (1, 3), (0, 1, 2, 3)])
def test_steps_are_torchs_own_with_moments_that_are_rounded_after_each_to_the_bit(
    dtypes: dict[str, torch.dtype], hosted: tuple[int, ...]
) -> None:
    """Five steps: whatever lies where, and in pieces."""
    (expected, theirs), (found, ours) = by_torch(dtypes), by_pieces(dtypes, hosted)
    assert same(expected, found)
    for one, other in zip(expected, found, strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):
            assert ours.state[other][kind].dtype == dtypes.get(kind, torch.float32)
            assert torch.equal(ours.state[other][kind].float(), theirs.state[one][kind])
        assert ours.state[other]["step"] == 5


def test_moments_of_fewer_bits_make_other_steps_and_nearly_the_same() -> None:
    exact, rounded = by_torch({})[0], by_pieces(HALF)[0]
    assert not same(exact, rounded)
    for one, other in zip(exact, rounded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # of five steps of 0.01


def test_a_weight_whose_numbers_are_not_taken_back_to_its_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(states: StoredStates, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = states._hosted.get(id(parameter), parameter.data)

    monkeypatch.setattr(StoredStates, "_send_weights_home", forgotten)
    expected, found = by_torch({})[0], by_pieces({}, hosted=(1, 3))[0]
    assert [torch.equal(one, other) for one, other in zip(expected, found, strict=True)] == [True, False, True, False]


def test_a_hosted_weight_lies_in_its_own_memory_between_steps_and_is_told_of_where_it_is_stepped() -> None:
    parameters = weights()
    homes, told = [parameter.data_ptr() for parameter in parameters], list[list[int]]()
    states = StoredStates(optimizer_of(parameters), "cpu", lambda *_: Home(), parameters)

    def stepped(piece: Sequence[nn.Parameter]) -> None:
        assert not {parameter.data_ptr() for parameter in piece} & set(homes)
        told.append([len(parameter) for parameter in piece])

    states.step_with(list(zip(parameters, gradients(0), strict=True)), stepped)
    assert told == [[400], [7, 90], [250]]
    assert [parameter.data_ptr() for parameter in parameters] == homes
    assert all(parameter.grad is None for parameter in parameters)


def test_memory_stays_pinned_while_the_numbers_of_a_weight_come_and_go_and_no_longer_than_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[tuple[str, int]]()

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            calls.append(("register", address))
            return 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unregister", address))

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    parameter = weights()[0]
    address = parameter.data_ptr()
    pin(parameter)
    states = StoredStates(optimizer_of([parameter]), "cpu", lambda *_: Home(), [parameter])
    states.step_with([(parameter, gradients(0)[0])])
    assert calls == [("register", address)]
    del states, parameter
    gc.collect()
    assert calls == [("register", address), ("unregister", address)]


def test_gradients_of_fewer_bits_are_widened_a_piece_at_a_time() -> None:
    parameters, plain = weights(), weights()
    states, optimizer = StoredStates(optimizer_of(parameters), "cpu", lambda *_: Home()), optimizer_of(plain)
    half = [gradient.bfloat16() for gradient in gradients(0)]
    states.step_with(list(zip(parameters, half, strict=True)))
    for parameter, gradient in zip(plain, half, strict=True):
        parameter.grad = gradient.float()
    optimizer.step()
    assert same(parameters, plain)
