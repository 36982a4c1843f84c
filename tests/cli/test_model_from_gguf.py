"""`scripts/model_from_gguf.py` against a file that llama.cpp's own library wrote: the same model, and ends where it ends."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.product import load_script

ROOT = Path(__file__).parents[2]
LAYERS, HEADS, KV_HEADS, HIDDEN, INNER = 2, 4, 2, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted({"Ġ", "Ċ", *(chr(at) for at in range(33, 127))})
MERGES = ["1 2", "a b", "Ġ ab"]
TOKENS = [*SPECIAL, *BYTES, "12", "ab", "Ġab"]
NAMES = {  # as llama.cpp's documentation of the format has them
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "scripts" / "model_from_gguf.py")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Its weights are numbers of bfloat16, so that only what the file quantises changes."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, initializer_range=0.3,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight.bfloat16())
    return made


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is Hugging Face's row i, row 2i + 1 its row d/2 + i."""
    per_head = len(weight) // heads
    order = [
        head * per_head + half * (per_head // 2) + i for head in range(heads) for i in range(per_head // 2) for half in (0, 1)
    ]
    return weight[order]


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    found = {}
    for name, weight in model.model.named_parameters():
        numbers = weight.detach().numpy()
        if name == "embed_tokens.weight":
            found["token_embd.weight"] = numbers
        elif name == "norm.weight":
            found["output_norm.weight"] = numbers
        else:
            _, layer, part = name.removesuffix(".weight").split(".", 2)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            found[f"blk.{layer}.{NAMES[part]}.weight"] = side_by_side(numbers, heads) if heads else numbers
    return found


def write(path: Path, tensors: dict[str, np.ndarray], kinds: dict[str, Kind], **other: str) -> Path:
    """A file as llama.cpp's converter makes it; `kinds` says which tensors are quantised."""
    writer = gguf.GGUFWriter(path, other.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(other.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    for name, tensor in tensors.items():
        kind = kinds.get(name, Kind.F32)
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(script, model, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    script.convert(write(made / "whole.gguf", gguf_tensors(model), {}), made / "model")
    return made / "model"


def test_each_weight_comes_back_under_its_name_in_its_order(folder, model):
    read = load_file(folder / "model.safetensors")
    assert read.keys() == {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        assert read[name].dtype == torch.bfloat16
        assert torch.equal(read[name].float(), weight), name


def test_transformers_loads_the_same_model(folder, model):
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.rope_parameters["rope_theta"] == 100000.0
    assert loaded.config.rms_norm_eps == 1e-5


def test_blocks_of_four_and_eight_bits_are_scaled_as_the_format_says(script, model, tmp_path):
    tensors = gguf_tensors(model)
    tensors["blk.1.ffn_up.weight"] = np.tile(np.arange(32, dtype=np.float32) % 16 - 3, (INNER, HIDDEN // 32))
    tensors["token_embd.weight"] = np.tile(np.arange(-127, 129, 8, dtype=np.float32), (len(TOKENS), HIDDEN // 32))
    kinds = {"blk.1.ffn_up.weight": Kind.Q4_1, "token_embd.weight": Kind.Q8_0}
    script.convert(write(tmp_path / "small.gguf", tensors, kinds), tmp_path / "model")
    read = load_file(tmp_path / "model" / "model.safetensors")
    assert read["model.layers.1.mlp.up_proj.weight"][7, :32].tolist() == [*range(-3, 13), *range(-3, 13)]
    assert read["model.embed_tokens.weight"][5, :4].tolist() == [-127.0, -119.0, -111.0, -103.0]


def test_answers_end_at_the_end_token_and_padding_ends_none(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    for file in ("config.json", "generation_config.json"):
        ends = json.loads((folder / file).read_text())
        assert (ends["eos_token_id"], ends["pad_token_id"]) == (2, 0)


def test_digits_are_tokens_of_their_own_and_merges_hold_elsewhere(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("12 ab<|im_end|>", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["1", "2", "Ġab", "<|im_end|>"]
    assert tokenizer.decode(ids) == "12 ab<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|im_start|>ab<|im_end|>"


def test_what_the_script_does_not_know_it_refuses_and_writes_no_model(script, model, tmp_path):
    tensors = gguf_tensors(model)
    biased = {**tensors, "blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    lacking = {name: tensor for name, tensor in tensors.items() if name != "blk.1.attn_k.weight"}
    cases = [
        (write(tmp_path / "qwen.gguf", tensors, {}, architecture="qwen2"), "general.architecture=qwen2"),
        (write(tmp_path / "pre.gguf", tensors, {}, pre="llama-bpe"), "gpt2/llama-bpe"),
        (write(tmp_path / "biased.gguf", biased, {}), "blk.0.attn_q.bias is not a tensor of a plain Llama"),
        (write(tmp_path / "lacking.gguf", lacking, {}), "holds 19 tensors: a Llama of 2 layers has 20"),
    ]
    for path, said in cases:
        with pytest.raises(SystemExit, match=said):
            script.convert(path, tmp_path / "model")
        assert not (tmp_path / "model" / "config.json").exists()
