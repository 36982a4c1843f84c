"""What samples have in common is computed once, and results, gradients, log-probs and metrics stay what they are without.

Kernels of FlashAttention are stand-ins as in test_attention.py; tests/gpu/check_attention.py has the real ones.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import TrainShard
from telescope.backends.common import attention, kernels, shared_prefixes
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.policy import UnfitModel
from telescope.maths import prefixes
from tests.backends.models import random_experts, random_model
from tests.backends.shards import VOCABULARY, in_minibatches, make_job, make_shard
from tests.backends.test_attention import HEADS, KEY_HEADS, WIDTH, stand_in  # noqa: F401 -- a fixture
from tests.backends.watching import distance

BOUNDARIES = np.array([0, 40, 75, 150, 150, 190, 200])
REPEATED = (0, 30, 33, 0, 0)
"""A sample, one that begins with 30 of its tokens, one with 33 of the second's; an empty one, one more, and padding."""


def rows_of(kind: kernels.Kind, repeated: tuple[int, ...]) -> tuple[attention.Segments, attention.Segments, np.ndarray]:
    """(The row as it is, the row that computes what is shared once, the places of its tokens there)."""
    apart = attention.segments(kind, BOUNDARIES, "cpu")
    return apart, attention.segments(kind, BOUNDARIES, "cpu", repeated=repeated), prefixes.places(BOUNDARIES, repeated)


def attend(kind: kernels.Kind, row: attention.Segments, given: tuple[Tensor, ...], window: int | None) -> Tensor:
    from transformers import AttentionInterface

    function = AttentionInterface()[attention.register(kind)]
    found: Tensor = function(torch.nn.Module(), *given, None, row=row, scaling=0.2, sliding_window=window)[0]
    return found


def drawn(tokens: int, *, grad: bool = True) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    given = [torch.randn(1, heads, tokens, WIDTH, generator=random) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return tuple(tensor.requires_grad_(grad) for tensor in given)


@pytest.mark.parametrize("kind", ["sdpa", "flash2", "flash3", "cudnn", "varlen", "flex"])
@pytest.mark.parametrize("window", [None, 8, 50])
@pytest.mark.usefixtures("stand_in")
def test_attention_and_its_gradients_are_those_of_samples_apart(kind: kernels.Kind, window: int | None):
    """Gradients of a shared token are the sum of those that its copies get. FlexAttention has no backward pass on a CPU."""
    apart, shared, places = rows_of(kind, REPEATED)
    index, grad = torch.from_numpy(places), kind != "flex"
    given = drawn(int(places.max()) + 1, grad=grad)
    listed = tuple(tensor.detach()[:, :, index].requires_grad_(grad) for tensor in given)
    expected, found = attend(kind, apart, listed, window), attend(kind, shared, given, window)
    torch.testing.assert_close(found[:, index], expected, rtol=0, atol=2e-6)
    if not grad:
        return
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(upstream)
    found.backward(torch.zeros_like(found).index_add_(1, index, upstream))
    for one, copies in zip(given, listed, strict=True):
        assert one.grad is not None
        assert copies.grad is not None
        torch.testing.assert_close(one.grad, torch.zeros_like(one).index_add_(2, index, copies.grad), rtol=0, atol=1e-5)


def test_a_sample_that_is_whole_in_another_asks_nothing():
    keys = shared_prefixes.SharedKeys(np.array([0, 40, 80, 130]), (0, 40, 20), "cpu")
    assert keys.queries_at.tolist() == [0, 40, 70]
    assert keys.keys_at.tolist() == [0, 40, 90]
    assert (keys.longest_asking, keys.longest) == (40, 50)


def grouped(step: int = 1, *, seed: int = 0) -> TrainShard:
    """Three groups: four answers to a prompt of 40; five branches of which three share 25 more tokens, sampled ones too, and
    two are the same; and two samples that share nothing."""
    lengths = (60, 75, 52, 41, 90, 84, 95, 70, 70, 30, 21)
    shard, random = make_shard(step, lengths, seed), np.random.default_rng(seed + 100)
    ends, ids, mask = np.cumsum(lengths), shard.ids.copy(), shard.mask.copy()
    starts = ends - lengths
    prompt, other, branch = (random.integers(0, VOCABULARY, count) for count in (40, 40, 25))
    for item in range(4):
        ids[starts[item] : starts[item] + 40], mask[starts[item] : starts[item] + 40] = prompt, 0
    for item in range(4, 9):
        ids[starts[item] : starts[item] + 40], mask[starts[item] : starts[item] + 40] = other, 0
        if item < 7:
            ids[starts[item] + 40 : starts[item] + 65] = branch
    ids[starts[8] : ends[8]], mask[starts[8] : ends[8]] = ids[starts[7] : ends[7]], mask[starts[7] : ends[7]]
    groups = [0] * 4 + [1] * 5 + [2, 3]
    items = tuple(
        msgspec.structs.replace(item, group_id=group, sequence_tokens=int(mask[start:end].sum()))
        for item, group, start, end in zip(shard.items, groups, starts, ends, strict=True)
    )
    logprobs = np.where(mask, -3.0 + 0.1 * random.standard_normal(len(mask)), np.nan).astype(np.float32)
    return in_minibatches(replace(shard, ids=ids, mask=mask, logprobs=logprobs, items=items), (len(items),))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return random_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


SAID_OF_ROWS = {"rows", "packed_tokens", "padding_fraction", "trainer_tokens_per_s", "filler_rows"}


@pytest.mark.parametrize("kind", ["sdpa", "flash2"])
@pytest.mark.parametrize("kept", [False, "selective", True])
@pytest.mark.usefixtures("stand_in")
def test_a_step_makes_the_same_gradient_update_and_metrics(build, model: str, kind: kernels.Kind, kept, monkeypatch):
    monkeypatch.setattr(kernels, "choose", lambda setting, here: kind)  # FlashAttention would refuse a CPU
    found = {}
    for shares in (False, True):
        backend = build(
            make_job(model=model, seq_len=512, pad_to_multiple_of=16),
            gradient_checkpointing=kept, share_prefixes=shares,
        )  # fmt: skip
        before = backend.logprobs(grouped())
        metrics = backend.train_step(grouped()).metrics
        found[shares] = backend.gradients, before, metrics, backend.logprobs(grouped())
    (plain, before, metrics, after), (shared, *others) = found[False], found[True]
    assert distance(plain, shared) < 1e-6
    np.testing.assert_allclose(others[0], before, rtol=0, atol=2e-5)
    np.testing.assert_allclose(others[2], after, rtol=0, atol=5e-5)
    assert metrics["packed_tokens"] == 688.0
    assert others[1]["packed_tokens"] == 688.0 - 3 * 40 - 4 * 40 - 2 * 25 - 30
    same = {name: value for name, value in metrics.items() if name not in SAID_OF_ROWS}
    assert {name: others[1][name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6)


def test_minibatches_a_reference_and_small_rows(build, model: str):
    """Log-probs from before the first update, those of a frozen model, samples' own temperatures, and several rows."""
    shard = in_minibatches(grouped(), (5, 6))
    found = []
    for shares in (False, True):
        job = make_job(model=model, seq_len=128, algorithm=GRPO(kl_ref_coef=0.1, use_ppo_clip=True))
        backend = build(job, share_prefixes=shares)
        metrics = backend.train_step(shard).metrics
        found.append((backend.updates, metrics))
    (plain, metrics), (shared, others) = found
    assert len(plain) == len(shared) == 2
    assert distance(plain[0], shared[0]) < 1e-6
    assert distance(plain[1], shared[1]) < 1e-4  # after an update of Adam, which magnifies what is near 0
    assert others["rows"] < metrics["rows"]
    assert others["loss"] == pytest.approx(metrics["loss"], rel=1e-4)


def test_the_same_step_twice_is_the_same_to_the_bit(build, model: str):
    found = []
    for _ in range(2):
        backend = build(make_job(model=model, seq_len=512), share_prefixes=True)
        backend.train_step(grouped())
        found.append(backend.gradients)
    assert all(torch.equal(left, found[1][name]) for name, left in found[0].items())


def test_a_gradient_that_misses_a_copy_would_be_seen(build, model: str, monkeypatch: pytest.MonkeyPatch):
    found = []
    for planted in (False, True):
        backend = build(make_job(model=model, seq_len=512), share_prefixes=True)
        if planted:
            monkeypatch.setattr(
                Tensor, "index_put_", lambda self, index, values, accumulate: self.index_copy_(0, *index, values)
            )
        backend.train_step(grouped())
        found.append(backend.gradients)
    assert distance(*found) > 1e-2


def test_a_kernel_that_puts_the_queries_elsewhere_is_refused_at_the_start(build, model: str, monkeypatch: pytest.MonkeyPatch):
    plain = shared_prefixes._SharedStack.seen

    def from_the_top(self, window):
        self._repeated = torch.zeros_like(self._repeated)
        return plain(self, window)

    monkeypatch.setattr(shared_prefixes._SharedStack, "seen", from_the_top)
    with pytest.raises(UnfitModel, match=r"backend.share_prefixes=true\): set it to false"):
        build(make_job(model=model), share_prefixes=True)


def test_models_with_experts_and_ranks_that_share_a_row_are_refused(build, tmp_path):
    experts = random_experts(tmp_path)
    with pytest.raises(UnfitModel, match=r"share_prefixes=true .* experts of Qwen3MoeForCausalLM get: set it to false"):
        build(make_job(model=experts), share_prefixes=True)
    with pytest.raises(ValueError, match=r"backend.share_prefixes=true and backend.context_parallel_size=2 do not go together"):
        FSDP(share_prefixes=True, context_parallel_size=2)
