"""Models of real shapes with random weights, for benchmarks on machines that reach no model hub.

    python -m benchmarks.shapes 3B FOLDER

The tokenizer makes one token of each byte, so that a prompt's text gives its length. What such a model writes is noise; its
speed and memory are those of the real one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from telescope.config.model_shapes import shape_of
from telescope.maths.memory import ModelShape

SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(
        layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=32, vocabulary=1024, tied=True, qk_norm=True
    ),
    "0.5B": shape_of("Qwen/Qwen2.5-0.5B"),
    "0.6B": shape_of("Qwen/Qwen3-0.6B"),
    "3B": shape_of("Qwen/Qwen2.5-3B"),
    "4B": shape_of("Qwen/Qwen3-4B"),
}
PAD_ID, END_ID = 0, 1


def model_config(shape: ModelShape) -> Any:
    """A Hugging Face configuration of the shape: Qwen3 where queries and keys are normalised, else Qwen2."""
    from transformers import Qwen2Config, Qwen3Config

    numbers: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied, "max_position_embeddings": 32_768, "eos_token_id": END_ID, "pad_token_id": PAD_ID,
    }  # fmt: skip
    if shape.qk_norm:
        return Qwen3Config(**numbers, head_dim=shape.head_dim, architectures=["Qwen3ForCausalLM"])
    return Qwen2Config(**numbers, architectures=["Qwen2ForCausalLM"])


def random_tensors(shape: ModelShape, device: str, dtype: Any, seed: int) -> dict[str, Any]:
    """The model's tensors by Hugging Face name, tied ones once, drawn on the device from `seed`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(name: str, size: Any) -> Any:
        noise = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
        return ((1 + 0.1 * noise) if "norm" in name else 0.02 * noise).to(dtype)

    return {name: drawn(name, tensor.shape) for name, tensor in model.named_parameters()}


def write_folder(folder: Path, shape: ModelShape, tensors: dict[str, Any]) -> None:
    """A model folder that servers and trainers load: config, tokenizer, weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(shape)
    config.dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def write_tokenizer(folder: Path, vocabulary: int, end: str = "<end>") -> None:
    """<pad>, <end>, the bytes, then words that no text contains, so that every id decodes. A byte-level BPE without merges:
    transformers makes one of any tokenizer that lies beside a model of Qwen's. `end`: which of them ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"w{index}" for index in range(len(names), vocabulary)]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<pad>")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made.save_pretrained(folder)


def make_model(shape: ModelShape, folder: Path) -> Path:
    """A folder with the shape in bfloat16, drawn on the GPU where there is one; what is there already is kept."""
    import torch

    if not (folder / "model.safetensors").is_file():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        write_folder(folder, shape, random_tensors(shape, device, torch.bfloat16, seed=0))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(make_model(SHAPES[given.shape], given.folder))


if __name__ == "__main__":
    main()
