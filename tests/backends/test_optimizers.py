"""The optimisers: 8-bit moments by their digits, Muon against torch's own, moments in host memory to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from telescope.backends.common import stored_states
from telescope.backends.common.stored_states import ON_HOST, StoredStates, pieces
from telescope.backends.fsdp import eight_bit, optimizers
from telescope.backends.fsdp.muon import orthogonalised
from telescope.config.sections import TrainerSettings

TRAINER = TrainerSettings(learning_rate=0.01, weight_decay=0.1, betas=(0.9, 0.95))


class Small(nn.Module):
    """An embedding, a layer with a tall, a wide and a fused matrix and a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(96, 48)
        layer = nn.ModuleDict(
            {"up": nn.Linear(48, 200, bias=False), "down": nn.Linear(300, 48, bias=False), "norm": nn.LayerNorm(48)}
        )
        self.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
        self.experts = nn.Parameter(torch.randn(3, 20, 30))


def give_gradients(module: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random) * 10.0 ** torch.randint(-4, 1, (1,), generator=random)


def trained(kind: optimizers.Kind, steps: int = 3, *, hosted: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = Small()
    optimizer = optimizers.make(kind, module, TRAINER)
    stepper = hosted_states(optimizer) if hosted else optimizer
    for step in range(steps):
        give_gradients(module, step)
        stepper.step()
    return module, optimizer


def hosted_states(optimizer: torch.optim.Optimizer) -> StoredStates:
    return StoredStates(optimizer, "cpu", lambda *_: ON_HOST)


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(one, two) for one, two in zip(left.parameters(), right.parameters(), strict=True))


# ---- 8-bit moments ---------------------------------------------------------------------------------------------------


def test_a_code_has_256_values_seven_powers_of_ten_and_twice_as_many_in_each():
    signed, plain = eight_bit.codebook(True), eight_bit.codebook(False)
    assert (len(signed), len(plain)) == (256, 256)
    assert (min(signed), max(signed), min(plain), max(plain)) == (-0.99296875, 1.0, 0.0, 1.0)
    assert min(value for value in signed if value > 0) == pytest.approx(0.55e-6)
    assert [value for value in plain if 0 < value < 1e-6] == pytest.approx([0.325e-6, 0.775e-6])
    assert sum(0.1 < value < 1 for value in plain) == 128


def test_each_block_of_256_columns_has_a_scale_and_its_entries_the_nearest_value_of_the_code():
    values = torch.zeros(2, 300)
    values[0, 0], values[0, 1], values[0, 299], values[1, 5] = -8.0, 4.0, 0.5, 1e-3
    codes, scales = eight_bit.encode(values, signed=True)
    assert codes.shape == (2, 300)
    assert scales.tolist() == [[8.0, 0.5], [pytest.approx(1e-3), 0.0]]
    found = eight_bit.decode(codes, scales, signed=True)
    assert found[0, 0] == pytest.approx(-8.0 * 0.99296875)
    assert found[0, 1] == pytest.approx(8.0 * 0.5007812, rel=1e-6)  # the middle of the 29th of 64 cells from 0.1 to 1
    assert found[0, 299] == 0.5
    assert found[1, 5] == pytest.approx(1e-3)
    assert int((found != 0).sum()) == 4


def test_a_second_moment_above_0_never_becomes_0():
    values = torch.tensor([[1.0, 1e-12, 0.0]])
    codes, scales = eight_bit.encode(values, signed=False)
    assert eight_bit.decode(codes, scales, signed=False)[0].tolist() == [1.0, pytest.approx(0.325e-6), 0.0]


def test_what_is_decoded_is_within_the_width_of_a_cell():
    """Of numbers within a factor of ten of the largest one: 0.9 / 64 / 2 of it with a sign, half as much without."""
    random = torch.Generator().manual_seed(0)
    values = 0.1 + 0.9 * torch.rand(50, 700, generator=random)
    for signed, width in ((True, 0.9 / 64), (False, 0.9 / 128)):
        found = eight_bit.decode(*eight_bit.encode(values, signed), signed)
        assert float((found - values).abs().max()) <= width / 2 * 1.01


def test_the_first_step_with_8_bit_moments_is_adamws_own():
    plain, _ = trained("adamw", 1)
    coded, optimizer = trained("adamw_8bit", 1)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter, coded.get_parameter(name), rtol=1e-6, atol=1e-7)
    state = optimizer.state[coded.embed.weight]
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        "step": ((), torch.float32),
        "exp_avg_codes": ((96, 48), torch.uint8),
        "exp_avg_scales": ((96, 1), torch.float32),
        "exp_avg_sq_codes": ((96, 48), torch.uint8),
        "exp_avg_sq_scales": ((96, 1), torch.float32),
    }
    assert set(optimizer.state[coded.model["layers"][0]["norm"].weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_fifty_steps_with_8_bit_moments_go_where_adamws_go():
    """A quadratic bowl whose axes differ by a factor of a thousand, its loss from 1,171 down to 15.7: 7 % more with codes."""
    starts, losses = [], []
    for kind in ("adamw", "adamw_8bit"):
        torch.manual_seed(2)
        module, scale = nn.Linear(128, 64, bias=False), torch.logspace(-3, 0, 128)
        target = torch.randn(64, 128)
        optimizer = optimizers.make(kind, module, TRAINER.model_copy(update={"learning_rate": 0.05}))
        for _ in range(50):
            optimizer.zero_grad()
            loss = ((module.weight - target) ** 2 * scale).sum()
            loss.backward()
            optimizer.step()
            starts = starts or [loss.item()]
        losses.append(loss.item())
    assert starts[0] > 50 * losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


# ---- Muon ------------------------------------------------------------------------------------------------------------


def test_muon_steps_the_layers_matrices_as_torch_does_and_all_else_as_adamw():
    """To the bit for AdamW; within a rounding of bfloat16's iteration for torch's own Muon."""
    module, optimizer = trained("muon")
    plain, reference = Small(), Small()
    matrices = [p for name, p in reference.named_parameters() if ".layers." in name and p.ndim == 2]
    assert len(matrices) == 2
    theirs = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = optimizers.make("adamw", plain, TRAINER)
    for step in range(3):
        for each, stepper in ((reference, theirs), (plain, adamw)):
            give_gradients(each, step)
            stepper.step()
    for name, parameter in module.named_parameters():
        expected = reference if ".layers." in name and parameter.ndim == 2 else plain
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert {frozenset(state) for state in optimizer.state.values()} == {
        frozenset({"step", "momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }  # fmt: skip


def test_singular_values_of_an_orthogonalised_matrix_are_near_1():
    random = torch.Generator().manual_seed(1)
    for shape in ((40, 90), (90, 40)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=random)).float())
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon", "sgd"])
def test_a_saved_state_goes_on_to_the_bit(kind: optimizers.Kind):
    module, optimizer = trained(kind, 2)
    other = copy.deepcopy(module)
    again = optimizers.make(kind, other, TRAINER)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepper in ((module, optimizer), (other, again)):
        give_gradients(each, 7)
        stepper.step()
    assert same(module, other)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_moments_that_come_from_host_memory_make_the_same_step_to_the_bit(kind: optimizers.Kind, monkeypatch):
    monkeypatch.setattr(stored_states, "AT_ONCE_BYTES", 40_000)
    plain, _ = trained(kind)
    hosted, optimizer = trained(kind, hosted=True)
    assert same(plain, hosted)
    assert all(parameter.grad is not None for parameter in hosted.parameters())
    assert len({id(value) for state in optimizer.state.values() for value in state.values()}) > 8


def test_moments_are_away_from_home_a_piece_at_a_time():
    """Never more than 40,000 bytes of parameters together, but for one that is larger."""
    parameters = list(Small().parameters())
    cut = list(pieces([(parameter, torch.zeros(())) for parameter in parameters], 40_000))
    assert [parameter for piece in cut for parameter, _ in piece] == parameters
    assert [[parameter.nbytes for parameter, _ in piece] for piece in cut] == [[7200, 18_432], [38_400], [57_600], [192, 192]]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_states_go_through_torchs_distributed_checkpoints_to_the_bit(kind: optimizers.Kind, tmp_path):
    """Saved by one process and loaded by another, moments on the host: the next step is the same."""
    import torch.distributed.checkpoint as saved
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for number in (0, 1):
            module = Small()
            fully_shard(module)
            optimizer = optimizers.make(kind, module, TRAINER)
            stepper = hosted_states(optimizer)
            for step in (0, 1) if number == 0 else ():
                step_spread(module, stepper, step)
            state = get_optimizer_state_dict(module, optimizer)
            if number == 0:
                saved.save(state, checkpoint_id=tmp_path / "one")
                weights = {name: p.full_tensor().clone() for name, p in module.named_parameters()}
            else:
                saved.load(state, checkpoint_id=tmp_path / "one")
                set_optimizer_state_dict(module, optimizer, state)
                with torch.no_grad():
                    for name, p in module.named_parameters():
                        p.to_local().copy_(weights[name])
            step_spread(module, stepper, 7)
            found.append([p.full_tensor() for p in module.parameters()])
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def step_spread(module: nn.Module, stepper: StoredStates, seed: int) -> None:
    whole = Small()
    give_gradients(whole, seed)
    for name, p in module.named_parameters():
        p.grad = distribute_tensor(whole.get_parameter(name).grad, p.device_mesh, p.placements)
    stepper.step()


def test_loaded_moments_go_home():
    _, optimizer = trained("adamw", 1)
    module = Small()
    other = optimizers.make("adamw", module, TRAINER)
    hosted = hosted_states(other)
    other.load_state_dict(optimizer.state_dict())
    homes = {home.data_ptr() for home in hosted._stores.values()}
    moments = [value for state in other.state.values() for value in state.values() if value.ndim]
    assert len(moments) == 12
    assert all(value.data_ptr() in homes for value in moments)
