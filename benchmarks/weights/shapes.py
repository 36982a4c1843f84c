"""Model folders with random weights in the shapes that weight updates are measured with; no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "kind": "qwen3", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
    },
    "0.5B": {  # Qwen2.5-0.5B
        "kind": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "0.6B": {  # Qwen3-0.6B
        "kind": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "3B": {  # Qwen2.5-3B
        "kind": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "4B": {  # Qwen3-4B
        "kind": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


def model_config(shape: str) -> Any:
    from transformers import Qwen2Config, Qwen3Config

    fields = {name: value for name, value in SHAPES[shape].items() if name != "kind"}
    made = Qwen2Config if SHAPES[shape]["kind"] == "qwen2" else Qwen3Config
    return made(**fields, max_position_embeddings=4096, eos_token_id=1, pad_token_id=0)


def random_tensors(shape: str, device: str, dtype: Any, seed: int) -> dict[str, Any]:
    """The model's tensors by Hugging Face name, tied ones once, drawn on the device from `seed`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape))
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(name: str, size: Any) -> Any:
        noise = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
        return ((1 + 0.1 * noise) if "norm" in name else 0.02 * noise).to(dtype)

    return {name: drawn(name, tensor.shape) for name, tensor in model.named_parameters()}


def write_folder(folder: Path, shape: str, tensors: dict[str, Any]) -> None:
    """A model folder that servers load: config, tokenizer of made-up words, weights."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(shape)
    config.architectures = ["Qwen2ForCausalLM" if SHAPES[shape]["kind"] == "qwen2" else "Qwen3ForCausalLM"]
    config.dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, 1000)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>", unk_token="<pad>").save_pretrained(
        folder
    )
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
