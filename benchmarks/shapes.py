"""Models of real shapes with random weights, for benchmarks on machines that reach no model hub.

    python -m benchmarks.shapes 3b FOLDER

The tokenizer makes one token of each byte, so that a prompt's text gives its length. Weights are drawn on the GPU where
there is one. What such a model writes is noise; its speed and memory are those of the real one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


def _qwen2(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp, "vocab_size": 151_936,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int = 151_936) -> dict[str, Any]:
    return {
        **_qwen2(hidden, layers, heads, kv_heads, mlp), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "head_dim": 128 if vocabulary > 1_000 else 32, "vocab_size": vocabulary,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(64, 2, 4, 2, 192, vocabulary=512),
    "0.5b": _qwen2(896, 24, 14, 2, 4_864),  # Qwen2.5-0.5B
    "0.6b": _qwen3(1_024, 28, 16, 8, 3_072),  # Qwen3-0.6B
    "3b": _qwen2(2_048, 36, 16, 2, 11_008),  # Qwen2.5-3B
    "4b": _qwen3(2_560, 36, 32, 8, 9_728),  # Qwen3-4B
}


def make_model(shape: str, folder: Path, *, dtype: str = "bfloat16") -> Path:
    """A Hugging Face folder of the shape, weights included; one that is there already is kept. Gives the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(SHAPES[shape]["vocab_size"], folder)
    end = SHAPES[shape]["vocab_size"] - 1
    config = {**SHAPES[shape], "dtype": dtype, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end - 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def make_tokenizer(vocabulary: int, folder: Path) -> None:
    """Bytes, then words that no text contains, so that every id decodes; the last two ids are <pad> and <eos>. A byte-level
    BPE without merges, since transformers makes one of any tokenizer that lies beside a model of Qwen's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words |= {f"w{index}": index for index in range(len(words), vocabulary - 2)}
    words |= {"<pad>": vocabulary - 2, "<eos>": vocabulary - 1}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(make_model(given.shape, given.folder))


if __name__ == "__main__":
    main()
