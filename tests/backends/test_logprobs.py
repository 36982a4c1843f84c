"""The chunked log-probs are those of the plain computation, and so are their gradients."""

from __future__ import annotations

import importlib.util
import math
import shutil

import pytest
import torch

from telescope.backends.common import vocabulary
from telescope.backends.common.logprobs import _kernels, logprobs
from telescope.maths.support import WHOLE, Support, left_out


def plain(hidden, weight, targets, temperature):
    logp = torch.log_softmax((hidden.float() @ weight.float().t()) / temperature, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def case(tokens=11, width=8, vocabulary=13, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


def test_two_even_logits_give_log_half_and_one_bit_of_entropy():
    logprob, entropy = logprobs(torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([1]), 1.0, 4)
    assert logprob.item() == pytest.approx(-math.log(2), abs=1e-7)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_of_any_chunk_are_the_plain_ones(temperature, chunk):
    hidden, weight, targets = case()
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(6))
    results = []
    for function in (plain, lambda *given: logprobs(*given, chunk)):
        logprob, entropy = function(hidden, weight, targets, temperature)
        loss = (logprob * upstream[0]).sum() + (entropy * upstream[1]).sum()
        results.append((logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_a_loss_of_logprobs_alone_and_one_of_entropy_alone_have_the_plain_gradients():
    hidden, weight, targets = case()
    for which in (0, 1):
        expected = torch.autograd.grad(plain(hidden, weight, targets, 0.7)[which].sum(), (hidden, weight))
        found = torch.autograd.grad(logprobs(hidden, weight, targets, 0.7, 4)[which].sum(), (hidden, weight))
        for left, right in zip(expected, found, strict=True):
            torch.testing.assert_close(right, left, rtol=2e-6, atol=2e-6)


def test_bfloat16_weights_still_give_float32_logprobs():
    hidden, weight, targets = case(dtype=torch.bfloat16)
    logprob, entropy = logprobs(hidden, weight, targets, 1.0, 4)
    expected, expected_entropy = plain(hidden, weight, targets, 1.0)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-6, atol=1e-6)
    logprob.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_logprobs_and_gradients_of_zero():
    hidden, weight, targets = case(tokens=0)
    logprob, _ = logprobs(hidden, weight, targets, 1.0, 4)
    logprob.sum().backward()
    assert logprob.shape == (0,)
    assert weight.grad.abs().sum() == 0


def test_no_tensor_of_all_tokens_times_the_vocabulary_is_made():
    """Sizes of all results of torch operations, forward and backward: none reaches T * V."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight, targets = case(tokens=64, width=4, vocabulary=100)
    with Watch():
        logprob, entropy = logprobs(hidden, weight, targets, 1.0, 8)
        torch.autograd.backward((logprob.sum(), entropy.sum()))
    assert largest == 8 * 100


EACH = (0.7, 1.0, 1.6)


def mixed(tokens=11):
    return torch.tensor([EACH[index % 3] for index in range(tokens)])


SUPPORTS = [Support(top_k=4), Support(min_p=0.2), Support(top_p=0.7), Support(top_k=6, top_p=0.9, min_p=0.01)]


@pytest.mark.parametrize("support", [WHOLE, *SUPPORTS])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_tokens_of_several_temperatures_are_those_of_each_alone_with_its_gradients(support, chunk):
    hidden, weight, targets = case()
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(6))
    temperatures = mixed()

    def gradients(logprob, entropy, picked):
        loss = (logprob * upstream[0][picked]).sum() + (entropy * upstream[1][picked]).sum()
        return torch.autograd.grad(loss, (hidden, weight))

    together = logprobs(hidden, weight, targets, temperatures, chunk, support)
    found = gradients(*together, torch.arange(11))
    expected = [torch.zeros_like(hidden), torch.zeros_like(weight)]
    for one in EACH:
        picked = (temperatures == one).nonzero()[:, 0]
        alone = logprobs(hidden[picked], weight, targets[picked], one, chunk, support)
        for mine, its in zip(together, alone, strict=True):
            torch.testing.assert_close(mine[picked], its, rtol=2e-6, atol=2e-6)
        for total, gradient in zip(expected, gradients(*alone, picked), strict=True):
            total += gradient
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=4e-6)
    at_one = logprobs(hidden, weight, targets, 1.0, chunk, support)[0]
    assert (at_one - together[0])[temperatures != 1].abs().min() > 1e-3


def test_one_temperature_makes_no_pass_more_over_the_logits():
    """Every operation on a [chunk, V] tensor, forward and backward, is counted: one number costs what it did."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.wide = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.wide += isinstance(result, torch.Tensor) and result.shape == (11, 13)
            return result

    def count(temperature):
        hidden, weight, targets = case()
        with Count() as counted:
            logprob, entropy = logprobs(hidden, weight, targets, temperature, 11)
            torch.autograd.backward((logprob.sum(), entropy.sum()))
        return counted.wide

    assert count(0.7) == 16  # as many as before tokens could have their own
    assert count(mixed()) == 17


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("chunk", [4, 100])
def test_a_cut_distribution_is_normalised_over_what_it_keeps_with_the_gradients_of_that(support, chunk):
    hidden, weight, targets = case()
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(6))

    def by_hand():
        logits = hidden @ weight.t() / 0.7
        cut = logits.masked_fill(left_out(logits.detach(), targets, support), -float("inf")).log_softmax(-1)
        finite = cut.masked_fill(cut.isinf(), 0.0)
        return cut.gather(1, targets[:, None]).squeeze(1), -(cut.exp() * finite).sum(-1)

    results = []
    for logprob, entropy in (by_hand(), logprobs(hidden, weight, targets, 0.7, chunk, support)):
        loss = (logprob * upstream[0]).sum() + (entropy * upstream[1]).sum()
        results.append((logprob, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    whole, _ = logprobs(hidden, weight, targets, 0.7, chunk)
    assert (results[1][0] > whole + 1e-3).any()
    assert (results[1][0] >= whole - 1e-6).all()


def test_a_host_without_a_c_compiler_does_without_triton_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert _kernels.__wrapped__() is None
    assert "Triton finds no C compiler (install gcc, or set CC)" in caplog.text


@pytest.mark.parametrize("support", [WHOLE, Support(top_k=3, top_p=0.9)])
def test_a_vocabulary_of_one_shard_is_the_whole_one_to_the_bit(support: Support):
    """Heads that are cut, over two and four ranks, are tests/backends/test_megatron.py's."""
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(9, 8), torch.randn(13, 8), torch.randint(0, 13, (9,))
    found = []
    for function, shard in ((logprobs, ()), (vocabulary.logprobs, (vocabulary.cut(13, 0, 1, None),))):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprob, entropy = function(h, w, targets, 0.7, 4, *shard, support)
        (logprob.sum() + 0.3 * entropy.sum()).backward()
        found.append((logprob, entropy, h.grad, w.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_vocabulary_is_cut_as_rows_are():
    """13 tokens on four ranks: 4, 4, 4 and 1; five tokens would leave the last one none."""
    shards = [vocabulary.cut(13, rank, 4, "group") for rank in range(4)]
    assert [(shard.first, shard.count) for shard in shards] == [(0, 4), (4, 4), (8, 4), (12, 1)]
    with pytest.raises(ValueError, match=r"5 tokens can't be cut into 4 parts of 2: the last would be empty"):
        vocabulary.cut(5, 0, 4, "group")
