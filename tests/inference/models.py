"""Random tiny Qwen3 checkpoints with a character tokenizer, made in seconds, for tests of real engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from telescope.inference.engine import Generated

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
EOS = "<|end|>"
PAD = "<|pad|>"


def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {PAD: 0, EOS: 1} | {character: index + 2 for index, character in enumerate(CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=PAD, unk_token=PAD)


def make_model(folder: Path, seed: int, tied: bool = True, head_dim: int = 32) -> Path:
    """Write a 2-layer Qwen3 (about 100k parameters, float32) with weights drawn from `seed`.

    The end token's logit is always 0: at a low temperature an answer never ends, at a high one it soon does.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    characters = tokenizer()
    config = Qwen3Config(
        vocab_size=len(characters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.35 if "embed" in name else 0.2))
        model.lm_head.weight[1] = 0.0
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    characters.save_pretrained(folder)
    return folder


def make_family(folder: Path, kind: str, seed: int, **changes: object) -> Path:
    """Write a 2-layer model of any of transformers' kinds (`Phi3Config` has `phi3`) with weights drawn from `seed`, norms and
    biases too, whose tokens are characters.

    Its config.json says nothing that the kind has no word for: transformers passes over such a word and vLLM believes it, so
    that `num_key_value_heads` beside GPT-NeoX, which has as many as heads, makes two models of one folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    characters = tokenizer()
    sizes = {
        "vocab_size": len(characters), "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "initializer_range": 0.2, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    kinds_own = AutoConfig.for_model(kind)
    words = kinds_own.to_dict().keys() | kinds_own.attribute_map.keys()
    known = {word: value for word, value in sizes.items() if word in words}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**known, **changes})).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    characters.save_pretrained(folder)
    return folder


def over_kept_cache(
    model_of: Callable[[Any], Any], prompt: np.ndarray, answer: Generated, which: Mapping[int, Any], temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of an answer, [T] float32, by transformers, if each token was sampled by the model of its version, and the keys
    and values of each position stayed those of the model that first computed it: the prompt's by the first token's."""
    import torch
    from transformers import DynamicCache

    tokens = torch.as_tensor(np.concatenate([prompt, answer.ids]).astype(np.int64))[None]
    cache, found, done = DynamicCache(), [], 0
    with torch.no_grad():
        for place, version in enumerate(answer.versions.tolist()):
            upto, model = len(prompt) + place, model_of(which[version])
            logits = model(tokens[:, done:upto], past_key_values=cache, use_cache=True).logits[0, -1].float() / temperature
            found.append(logits.log_softmax(-1)[tokens[0, upto]].item())
            done = upto
    return np.asarray(found, dtype=np.float32)
