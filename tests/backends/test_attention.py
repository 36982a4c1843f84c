"""Attention over packed rows: no sample sees another, by any kernel that runs here, in any kind of model that is taken.

FlashAttention's packages run on GPUs alone. A stand-in with their signature, computed by hand from the lengths that it is
given, shows what they would be told; tests/gpu/check_attention.py runs the real ones.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import (
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from telescope.backends.common import attention, kernels
from telescope.backends.common.attention_choice import KernelHost, choose
from telescope.backends.common.masks import Look
from telescope.backends.fsdp import policy
from telescope.backends.fsdp.policy import UnfitModel
from tests.backends.plain import token_mean
from tests.backends.shards import make_job, make_shard
from tests.backends.test_fsdp import draw, logprobs_of, row_of
from tests.backends.watching import distance

LENGTHS = (5, 33, 64, 2, 90)
HEADS, KEY_HEADS, WIDTH = 4, 2, 16


def by_hand(
    q, k, v, at_q, at_k, longest_q, longest_k, *, softmax_scale=None, causal=False, window_size=(-1, -1)
) -> Tensor:  # fmt: skip
    """What `flash_attn_varlen_func` computes, a segment and a head at a time: its queries are the last of its keys."""
    assert causal
    assert at_q.dtype == at_k.dtype == torch.int32
    assert (longest_q, longest_k) == (int(at_q.diff().max()), int(at_k.diff().max()))
    assert (at_k.diff() >= at_q.diff()).all()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    pieces = []
    for start, stop, first, last in zip(*(at.tolist() for at in (at_q[:-1], at_q[1:], at_k[:-1], at_k[1:])), strict=True):
        heads = []
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            back = torch.arange(last - first)[start - stop :, None] - torch.arange(last - first)[None, :]
            seen = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
            scores = q[start:stop, head] @ k[first:last, shared].t() * scale
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[first:last, shared])
        pieces.append(torch.stack(heads, dim=1))
    return torch.cat(pieces)


@pytest.fixture
def stand_in(monkeypatch) -> Iterator[None]:
    """Under a name of its own: transformers looks for the packages too."""
    module = types.ModuleType("flash_by_hand")
    module.__spec__ = ModuleSpec(module.__name__, None)
    module.flash_attn_varlen_func = by_hand
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for kind in kernels.PACKAGES:
        monkeypatch.setitem(kernels.PACKAGES, kind, module.__name__)
    monkeypatch.setattr(kernels, "_built_in", lambda: kernels._installed(module.__name__))
    monkeypatch.setattr(attention, "LONG", 64)  # of LENGTHS two are
    monkeypatch.setattr(attention, "STEP", 16)
    kernels.by_lengths.cache_clear()
    yield
    kernels.by_lengths.cache_clear()


def attend(kind: kernels.Kind, inputs: tuple[Tensor, ...], window: int | None = None) -> Tensor:
    """[1, T, Hq, D], through transformers' registry as a model would call it."""
    from transformers import AttentionInterface

    function: Callable = AttentionInterface()[attention.register(kind)]
    row = attention.segments(kind, np.cumsum([0, *LENGTHS]), "cpu")
    module = torch.nn.Module()
    return function(module, *inputs, None, row=row, scaling=0.2, sliding_window=window, dropout=0.0)[0]


def inputs(changed: int | None = None, grad: bool = True) -> tuple[Tensor, ...]:
    """Queries, keys and values of one row; `changed`: the sample that is another one."""
    random = torch.Generator().manual_seed(1)
    found = [torch.randn(1, heads, sum(LENGTHS), WIDTH, generator=random) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    if changed is not None:
        start = sum(LENGTHS[:changed])
        for tensor in found:
            tensor[:, :, start : start + LENGTHS[changed]] += 3.0
    return tuple(tensor.requires_grad_(grad) for tensor in found)


def of_others(tensor: Tensor, changed: int, axis: int) -> Tensor:
    start, stop = sum(LENGTHS[:changed]), sum(LENGTHS[: changed + 1])
    kept = [place for place in range(sum(LENGTHS)) if not start <= place < stop]
    return tensor.index_select(axis, torch.tensor(kept))


@pytest.mark.parametrize("kind", ["sdpa", "flash2", "flash3", "cudnn"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_a_sample_that_changes_moves_no_bit_of_the_others_nor_of_their_gradients(stand_in, kind, window, changed):
    results = []
    for given in (inputs(), inputs(changed)):
        out = attend(kind, given, window)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        out.backward(upstream)
        results.append([of_others(out.detach(), changed, 1), *(of_others(tensor.grad, changed, 2) for tensor in given)])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("window", [None, 8])
def test_flex_sees_what_the_others_see(window):
    """Its forward pass alone: PyTorch has no backward pass of it on a CPU."""
    with torch.no_grad():
        expected = attend("sdpa", inputs(grad=False), window)
        torch.testing.assert_close(attend("flex", inputs(grad=False), window), expected, rtol=0, atol=2e-6)
        for changed in range(len(LENGTHS)):
            moved = attend("flex", inputs(changed, grad=False), window)
            left, right = (of_others(each, changed, 1) for each in (moved, attend("flex", inputs(grad=False), window)))
            assert torch.equal(left, right)


@pytest.mark.parametrize("kind", ["flash2", "flash3", "cudnn"])
@pytest.mark.parametrize("window", [None, 8])
def test_the_flash_kernels_are_told_lengths_scale_and_window(stand_in, kind, window):
    torch.testing.assert_close(attend(kind, inputs(), window), attend("sdpa", inputs(), window), rtol=0, atol=2e-6)


def test_long_samples_have_a_kernel_of_their_own_and_neighbours_that_are_not_share_one():
    """4,096 tokens are long."""
    lengths = (5, 4095, 4096, 7, 5000, 5001, 2, 3)
    parts = attention.segments("cudnn", np.cumsum([0, *lengths]), "cpu").parts
    found = [(part.tokens, None if part.boundaries is None else part.boundaries.tolist(), part.longest) for part in parts]
    assert found == [
        (4100, [0, 5, 4100], 4095), (4096, None, 0), (7, [0, 7], 7), (5000, None, 0), (5001, None, 0), (5, [0, 2, 5], 3),
    ]  # fmt: skip


# ---- models ----------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2, "eos_token_id": 1,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TAKEN = {
    "qwen2, every second layer with a window": ("qwen2", {
        "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "phi3, fused q, k and v": ("phi3", {}),
    "gemma3, windows and two kinds of positions": ("gemma3_text", {
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 20}),
    "gemma4, heads of two widths, the last layers with the keys of those before": ("gemma4_text", {
        "sliding_window": 8, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 2}),
    "deepseek_v3, a compressed cache, values narrower than keys": ("deepseek_v3", {
        "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 2}),
    "seed_oss, biases and dropout by function": ("seed_oss", {"residual_dropout": 0.1}),
    "smollm3, layers without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "apertus, numbers without an axis": ("apertus", {"rope_scaling": None}),
}  # fmt: skip
DSA = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 2, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16,
    "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip
REFUSED = {
    "gemma2": ("gemma2", {"sliding_window": 8}, "attention uses softcap, which no attention of this backend computes"),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "attention uses s_aux, which no attention"),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}, "Mamba2ForCausalLM"),
    "lfm2, convolutions that reach into the sample before": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "Lfm2ForCausalLM lets a packed sample see its neighbour",
    ),
    "phimoe, a window in its mask alone": (
        "phimoe",
        {"sliding_window": 20, "num_local_experts": 4},
        r"hides tokens of samples of 21 tokens and more by a mask alone .* set inference\.max_model_len=20 or less "
        r"\(samples have up to 256 tokens\)",
    ),
    "doge, a mask of numbers that it makes itself": (
        "doge",
        {"num_experts": 4},
        "DogeForCausalLM has a mask of its own making, which no attention of this backend computes",
    ),
    "minimax_m3, which chooses blocks of keys": (
        "minimax_m3_vl_text",
        {"num_local_experts": 4, "layer_types": ["full_attention", "minimax_m3_sparse"]},
        r"chooses for each token which of those before it it sees \(MiniMaxM3VLIndexer\), which no attention of this backend",
    ),
    "phimoe, a window that is not a multiple of what rows are": (
        "phimoe",
        {"sliding_window": 150, "num_local_experts": 4},
        r"hides tokens of samples of 151 tokens and more .* set inference\.max_model_len=150 or less",
    ),
    "glm_moe_dsa, which chooses keys": (
        "glm_moe_dsa",
        DSA,
        r"^model\.name=.*GlmMoeDsaForCausalLM chooses .* \(GlmMoeDsaIndexer\)",
    ),
    "deepseek_v32, which chooses keys": ("deepseek_v32", DSA, r"^model\.name=.*DeepseekV32ForCausalLM chooses .*Indexer\)"),
    "stablelm": ("stablelm", {"hidden_size": 64}, "layers do not hand on to their attention what they are given"),
}


def drawn(folder, kind: str, changes: dict) -> str:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes})).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", TAKEN)
def test_a_packed_samples_logprobs_are_those_of_the_plain_model(build, tmp_path, name):
    """Samples longer than the window, at positions that begin again; and another neighbour moves no bit."""
    folder = drawn(tmp_path / "model", *TAKEN[name])
    backend = build(make_job(model=folder))
    samples = draw(21, 50)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logp = plain(torch.from_numpy(samples[1])[None]).logits[0].log_softmax(-1)
    expected = logp[:-1].gather(1, torch.from_numpy(samples[1])[1:, None]).squeeze(1)
    found = logprobs_of(backend, row_of(samples))[20:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(found, logprobs_of(backend, row_of([draw(21, seed=9)[0], samples[1]]))[20:])


def test_a_window_changes_the_gradient_as_it_does_in_the_plain_model(build, tmp_path):
    folder = drawn(tmp_path / "model", *TAKEN["gemma3, windows and two kinds of positions"])
    shard = make_shard()
    backend = build(make_job(model=folder))
    backend.train_step(shard)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loss = token_mean(plain, shard)
    loss.backward()
    assert distance({f"lm.{name}": parameter.grad for name, parameter in plain.named_parameters()}, backend.gradients) < 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_layers_do_more_is_refused_with_the_reason(build, tmp_path, name):
    kind, changes, sentence = REFUSED[name]
    folder = drawn(tmp_path / "model", kind, changes)
    with pytest.raises((UnfitModel, ValueError), match=sentence):
        build(make_job(model=folder))


def test_a_first_pass_that_ends_in_an_error_of_the_layers_own_is_a_refusal(build, tmp_path, monkeypatch):
    """GLM's sparse layers look into a mask that attention here does not make."""
    monkeypatch.setattr(policy, "_sees_all", lambda lm, name: None)
    folder = drawn(tmp_path / "model", "glm_moe_dsa", DSA)
    with pytest.raises(UnfitModel, match="GlmMoeDsaForCausalLM ends its first pass over a packed row with TypeError: "):
        build(make_job(model=folder))


MASKED = ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "num_experts": 4,
                        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24})  # fmt: skip
"""Qwen2-MoE's layers keep their window to their mask, which attention here does not make."""


@pytest.mark.parametrize(
    ("rows", "longest", "taken"),
    [(20, None, True), (21, None, False), (256, 20, True), (256, 21, False), (20, 256, True), (256, None, False)],
)
def test_a_window_that_no_layer_tells_its_attention_of_is_refused_where_samples_may_be_longer(
    build, tmp_path, rows, longest, taken
):
    """However long the rows are, which hold many samples: what counts is the longest one that the server allows."""
    folder = drawn(tmp_path / "model", *MASKED)
    job = replace(make_job(model=folder, seq_len=rows, pad_to_multiple_of=1), max_model_len=longest)
    if taken:
        build(job)
        return
    most = min(rows, longest or rows)
    with pytest.raises(
        UnfitModel,
        match=rf"Qwen2MoeForCausalLM hides tokens of samples of 21 tokens and more .* set inference\.max_model_len=20 or less "
        rf"\(samples have up to {most} tokens\)",
    ):
        build(job)


@pytest.mark.parametrize("kind", ["sdpa", "flash2", "flash3", "varlen", "cudnn", "flex"])
@pytest.mark.parametrize("model", [MASKED, TAKEN["mistral with a window"]], ids=["kept to its mask", "told"])
def test_samples_in_a_row_longer_than_the_window_have_the_logprobs_that_each_has_alone(
    stand_in, build, tmp_path, monkeypatch, model, kind
):
    """Positions begin again at each sample, so a window that no sample is longer than hides nothing, and one that is told hides
    of each sample what it hides of it alone."""
    folder = drawn(tmp_path / "model", *model)
    monkeypatch.setattr(kernels, "choose", lambda *_: kind)
    backend = build(replace(make_job(model=folder), max_model_len=20))
    samples = draw(20, 9, 20, 17, 20)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = []
    with torch.no_grad():
        for sample in samples:
            logp = plain(torch.from_numpy(sample)[None]).logits[0].log_softmax(-1)
            expected.append(logp[:-1].gather(1, torch.from_numpy(sample)[1:, None]).squeeze(1))
    found = logprobs_of(backend, row_of(samples, kind=kind))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-4)


def test_a_sample_longer_than_was_said_is_not_trained_without_its_window(build, tmp_path):
    """A server allows none; a batch that is run again may hold one."""
    backend = build(replace(make_job(model=drawn(tmp_path / "model", *MASKED)), max_model_len=20))
    backend.logprobs(make_shard(lengths=[20, 20]))
    with pytest.raises(UnfitModel, match="hides tokens of samples of 21 tokens and more"):
        backend.logprobs(make_shard(lengths=[20, 21]))


Rule = Callable[[int, int, Tensor, Tensor], Tensor]


def chunks_of(size: int) -> Rule:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("rule", "window", "shortest"),
    [
        (causal_mask_function, None, None),
        (causal_mask_function, 1000, None),
        (causal_mask_function, 999, 1000),
        (sliding_window_causal_mask_function(7), 7, None),
        (sliding_window_causal_mask_function(7), None, 8),
        (sliding_window_causal_mask_function(7), 8, 8),
        (sliding_window_causal_mask_function(8), 7, 8),
        (sliding_window_causal_mask_function(999), None, 1000),
        (sliding_window_causal_mask_function(1000), None, None),
        (chunks_of(100), None, 101),
        (chunks_of(1000), None, None),
    ],
)
def test_the_shortest_sample_that_a_mask_treats_otherwise_is_found_to_the_token(rule: Rule, window: int | None, shortest):
    """Of samples up to 1,000 tokens: a window of w tokens hides something from the sample of w + 1 tokens on."""
    look = Look(1000)
    with look.at("telescope_of_a_test"):
        mask = AttentionMaskInterface()["telescope_of_a_test"](batch_size=1, q_length=3, kv_length=3, mask_function=rule)
        look.saw(mask, {"sliding_window": window})
        look.saw(mask[:, :, :2], {"sliding_window": window})  # a part of it, as some layers take
        look.saw(None, {})
    assert look.shortest == shortest
    assert not look.foreign
    assert "telescope_of_a_test" not in AttentionMaskInterface()


def looked(seen: Callable[[Tensor], Tensor], rule: Rule = causal_mask_function, tokens: int = 9) -> Look:
    """What is found where a layer of a row of 9 tokens hands this of its mask to its attention."""
    look = Look(1000)
    with torch.no_grad(), look.at("telescope_of_a_test"):
        mask = AttentionMaskInterface()["telescope_of_a_test"](
            batch_size=1, q_length=tokens, kv_length=tokens, mask_function=rule
        )
        look.saw(seen(mask), {})
    return look


def test_a_part_of_a_mask_is_judged_by_its_rule_and_one_made_of_it_is_refused_though_it_hides_nothing_of_nine_tokens():
    window = sliding_window_causal_mask_function(20)
    assert looked(lambda mask: mask[:, :, :, :9].expand(1, 4, 9, 9), window).shortest == 21
    assert looked(lambda mask: mask[:, :, :3]).foreign == ""
    made = looked(lambda mask: mask & torch.ones(9, 9, dtype=torch.bool), window)
    assert (made.shortest, made.foreign) == (None, "a mask of its own making")


@pytest.mark.parametrize("rule", [bidirectional_mask_function, sliding_window_bidirectional_mask_function(20)])
def test_a_mask_that_shows_a_token_what_comes_after_it_is_refused(rule: Rule):
    assert "shows a token what comes after it" in looked(lambda mask: mask, rule).foreign


def test_a_rule_that_looks_up_the_rows_own_tokens_is_not_asked_about_others():
    """Of text alone Gemma 4's masks say of each of the row's tokens that it belongs to no image."""
    rule = or_masks(causal_mask_function, blockwise_overlay(torch.full((1, 9), -1)))
    with pytest.raises(IndexError):
        rule(0, 0, torch.tensor([9]), torch.arange(10))
    found = looked(lambda mask: mask, rule)
    assert (found.shortest, found.foreign) == (None, "")
    assert looked(lambda mask: mask, or_masks(rule, bidirectional_mask_function)).foreign


# ---- the choice ------------------------------------------------------------------------------------------------------


def gpu(capability: int, *packages: str, dtype: str = "bfloat16") -> KernelHost:
    return KernelHost("cuda:0", dtype, capability, frozenset(packages))


BOTH = ("flash_attn_interface", "flash_attn")


@pytest.mark.parametrize(
    ("here", "kind"),
    [
        (gpu(9, *BOTH), "flash3"),
        (gpu(8, *BOTH), "flash2"),
        (gpu(10, *BOTH), "cudnn"),
        (gpu(9), "cudnn"),
        (gpu(8), "varlen"),
        (replace(gpu(9), cudnn=False), "varlen"),
        (gpu(7), "flex"),
        (gpu(9, *BOTH, dtype="float32"), "flex"),
        (KernelHost("cpu", "float32"), "sdpa"),
        (KernelHost("cpu", "bfloat16", packages=frozenset(BOTH)), "sdpa"),
    ],
)
def test_auto_takes_the_first_kernel_that_works(here: KernelHost, kind: str):
    assert choose("auto", here) == kind
    assert choose("sdpa", here) == "sdpa"


def test_the_log_names_the_kernel_that_was_taken(build, caplog):
    with caplog.at_level("INFO", logger="telescope.backends.fsdp.assembly"):
        build(make_job())
    assert "computing in float32, attention sdpa (samples of like length stacked), checkpointing none" in caplog.text


def test_flash_is_the_first_of_the_three_flash_kernels():
    assert choose("flash", gpu(9, "flash_attn")) == "flash2"
    assert choose("flash", gpu(9)) == "varlen"


@pytest.mark.parametrize(
    ("setting", "here", "sentence"),
    [
        (
            "flash2",
            gpu(9),
            "backend.attention=flash2 needs the package flash_attn, which is not installed \\(run pip install "
            "--no-build-isolation 'flash-attn>=2.8,<2.9', the extra `flash` of telescope-rl\\): use cudnn, or auto",
        ),
        (
            "flash3",
            gpu(8, *BOTH),
            "backend.attention=flash3 needs a GPU of compute capability exactly 9, and this one has 8: use ",
        ),
        (
            "varlen",
            gpu(7),
            "backend.attention=varlen needs a GPU of compute capability at least 8, and this one has 7: use flex",
        ),
        (
            "cudnn",
            gpu(8),
            "backend.attention=cudnn needs a GPU of compute capability at least 9, and this one has 8: use varlen, or auto",
        ),
        ("flash", gpu(9, dtype="float32"), "computes in bfloat16 or float16 on a GPU, not float32 on cuda:0: use flex"),
        ("flex", KernelHost("cpu", "float32"), "backend.attention=flex trains on a GPU only, not on cpu: use sdpa, or auto"),
    ],
)
def test_a_kernel_that_cannot_work_is_refused_with_the_reason_and_the_one_that_can(setting, here, sentence):
    with pytest.raises(ValueError, match=sentence):
        choose(setting, here)
