"""`python -m telescope export STEP --run-dir DIR --to FOLDER`: a checkpoint's weights as a Hugging Face model.

Writes safetensors, config, generation config and tokenizer, which transformers and vLLM load; of a run with adapters these
alone, as peft writes them, or merged into the model (`--merge`). Whole or not at all: a folder that is not finished has another
name. Reads the run directory and never writes there. Exit codes: 0 done, 1 refused or failed, 2 usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.backends.base import CheckpointUnfit
from telescope.cli.arguments import above_zero
from telescope.config.models import ModelNotFound, model_folder, model_source
from telescope.config.sections import LoraSettings, ModelSettings
from telescope.runlog import checkpoints, opening
from telescope.runlog.layout import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.backends.common.saving import ShardReader

OK, FAILED, USAGE = 0, 1, 2
HELD = "held"
MODEL = "model."
ADAPTER = "base_model.model."
AT_ONCE_BYTES = 2 << 30
"""What is read of a checkpoint at a time."""
BESIDE_ADAPTERS = ("*token*", "vocab.*", "merges.txt", "*.model", "chat_template*")
"""What goes with adapters as it is: all that a dialogue needs before it is token ids."""
BESIDE_WEIGHTS = ("generation_config.json", "*.py", *BESIDE_ADAPTERS)
"""What goes with the weights as it is."""


class ExportRefused(ValueError):
    """The sentence says why and what to do."""


@dataclass(frozen=True)
class Wanted:
    """`dtype`: torch's name, or `held` for what the trainer holds. `shard_bytes`: of one safetensors file, at most."""

    dtype: str = HELD
    shard_bytes: int = 5_000_000_000
    merge: bool = False


def main(arguments: Sequence[str]) -> int:
    """The exit code; what was written goes to stdout, complaints to stderr."""
    asked = _parser().parse_args(list(arguments))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    wanted = Wanted(asked.dtype, sys.maxsize if asked.single_file else int(asked.shard_gb * 1e9), asked.merge)
    try:
        for line in export_all(RunDirectory(asked.run_dir.absolute()), asked.step, asked.to, wanted, asked.checkpoints):
            sys.stdout.write(line + "\n")
    except (ExportRefused, CheckpointUnfit, checkpoints.CheckpointUnreadable, ModelNotFound, ValueError) as error:
        sys.stderr.write(f"telescope export: {error}\n")
        return FAILED
    except OSError as error:
        sys.stderr.write(f"telescope export: {error.filename or asked.to}: {error.strerror or error}\n")
        return FAILED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope export", description="A checkpoint's weights as a model folder.")
    parser.add_argument("step", metavar="STEP", type=_step, help="a step with a complete checkpoint, `latest`, or `all`")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True, help="a new folder; with `all`, one a step is made in it")
    parser.add_argument("--checkpoints", type=Path, help="where they lie, if not where the run's checkpoint.dir says")
    parser.add_argument("--dtype", choices=(HELD, "bfloat16", "float16", "float32"), default=HELD)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--shard-gb", type=above_zero, default=5.0, help="size of a safetensors file, at most (default: 5)")
    size.add_argument("--single-file", action="store_true", help="all weights in one file")
    parser.add_argument("--merge", action="store_true", help="adapters merged into the model, instead of the adapters alone")
    return parser


def export_all(run: RunDirectory, step: int | str, to: Path, wanted: Wanted, directory: Path | None = None) -> Iterator[str]:
    """One sentence a folder written. Raises `ExportRefused`, `CheckpointUnfit`, `CheckpointUnreadable`, OSError."""
    config = opening.read(run)
    root = directory or checkpoints.root(run, config.checkpoint.dir)
    if step == "all":
        found = checkpoints.steps(root) or [checkpoints.read(checkpoints.find(root)).step]
        targets = [(checkpoints.complete_folder(root, each), to / f"step_{each:08d}") for each in found]
    else:
        targets = [(checkpoints.find(root, step if isinstance(step, int) else None), to)]
    for source, target in targets:
        facts = checkpoints.read_whole(source, config.checkpoint.verify)
        if not any(checkpoints.trainer_part(source).glob("*.safetensors")) and source.is_dir():
            raise ExportRefused(f"{source} has no weights in safetensors: backend={config.backend_name} saves none to export")
        try:
            nbytes = export(checkpoints.trainer_part(source), config.model, target, wanted)
        except (CheckpointUnfit, FileNotFoundError) as error:
            if source.is_dir():
                raise
            raise ExportRefused(
                f"{source} was deleted while it was read (checkpoint.keep_last): export again, and choose a later step"
            ) from error
        size = f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
        yield f"step {facts.step}: {size} in {target}"


def export(source: Path, model: ModelSettings, to: Path, wanted: Wanted) -> int:
    """One checkpoint's trainer part to a new folder; gives its bytes. Raises as `export_all` does."""
    from telescope.backends.common.saving import ShardReader

    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportRefused(f"--to {to} exists and is not empty: name a new folder")
    if to.exists() and to.samefile(Path()):  # it would be replaced, and whoever is in it would see nothing
        raise ExportRefused(f"--to {to} is the folder that this command is given in: name a new one")
    if wanted.merge and model.lora is None:
        raise ExportRefused("--merge is for runs with model.lora, and this one trained all weights: leave it out")
    reader = ShardReader(source)
    partial = to.with_name(f".{to.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        if model.lora is not None and not wanted.merge:
            _write_adapters(reader, model, model.lora, partial, wanted.dtype)
        else:
            _write_model(reader, model, partial, wanted)
        _readable_alike(partial)
        checkpoints.sync_below(partial)
        if to.exists():
            to.rmdir()
        os.rename(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checkpoints.nbytes_below(to)


def _readable_alike(folder: Path) -> None:
    """safetensors makes files that their owner alone may read; whoever may read the configuration may read the weights."""
    mode = min(folder.glob("*config.json")).stat().st_mode & 0o777
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _write_model(reader: ShardReader, model: ModelSettings, folder: Path, wanted: Wanted) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    held = getattr(torch, model.dtype)
    dtype = held if wanted.dtype == HELD else getattr(torch, wanted.dtype)
    base = model_folder(model.name)
    lm = AutoModelForCausalLM.from_pretrained(
        base, dtype=held if model.lora else dtype, trust_remote_code=model.trust_remote_code
    )
    if model.lora is not None:
        if dtype != held:  # else the sum would be rounded to the model's own precision in between
            lm.float()
        _merge(reader, lm, model.lora)
        lm.to(dtype)
    else:
        parameters = {MODEL + name: parameter.data for name, parameter in lm.named_parameters()}
        _check_names(reader, set(parameters))
        _check_shapes(reader, parameters)
        for name, tensor in _read(reader, list(parameters), held):
            parameters[name].copy_(tensor)
    lm.save_pretrained(folder, max_shard_size=wanted.shard_bytes)
    _copy_beside(BESIDE_WEIGHTS, base, model, folder)


def _copy_beside(patterns: Sequence[str], base: Path, model: ModelSettings, folder: Path) -> None:
    """The files of the model that the patterns name, and the run's own chat template where it had one."""
    for pattern in patterns:
        for file in base.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    if model.chat_template is not None:
        (folder / "chat_template.jinja").write_text(model.chat_template, encoding="utf-8")


def _merge(reader: ShardReader, lm: Any, lora: LoraSettings) -> None:
    """W + alpha / rank · B A, added in float32."""
    import torch

    names = [name for name in reader.shapes if name.startswith(MODEL + ADAPTER)]
    _check_names(reader, set(names))
    found = dict(_read(reader, names, torch.float32))
    for name in sorted(names):
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(MODEL + ADAPTER).removesuffix(".lora_A.weight")
        weight = lm.get_submodule(module).weight.data
        update = found[name.replace(".lora_A.", ".lora_B.")] @ found[name]
        weight.copy_(weight.float() + lora.alpha / lora.rank * update)


def _write_adapters(reader: ShardReader, model: ModelSettings, lora: LoraSettings, folder: Path, dtype: str) -> None:
    """adapter_config.json and adapter_model.safetensors, as peft writes them, and the tokenizer. The model beneath is named by
    its hub id, and else by its path: nobody but us knows the name of an embedded one."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    names = [name for name in reader.shapes if name.startswith(MODEL + ADAPTER)]
    _check_names(reader, set(names))
    wanted = torch.float32 if dtype == HELD else getattr(torch, dtype)
    tensors = {name.removeprefix(MODEL): tensor.to(wanted) for name, tensor in _read(reader, names, torch.float32)}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(lora.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_source(model.name),
        inference_mode=True,
    ).save_pretrained(str(folder))
    _copy_beside(BESIDE_ADAPTERS, model_folder(model.name), model, folder)


def _read(reader: ShardReader, names: Sequence[str], dtype: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors on the CPU in the dtype that they were saved in, a part of them at a time."""
    import torch

    part: dict[str, Tensor] = {}
    for number, name in enumerate(names, start=1):
        part[name] = torch.empty(reader.shapes[name], dtype=dtype)
        if number == len(names) or sum(tensor.nbytes for tensor in part.values()) >= AT_ONCE_BYTES:
            reader.read_into(part)
            yield from part.items()
            part = {}


def _check_names(reader: ShardReader, expected: set[str]) -> None:
    there = {name for name in reader.shapes if name.startswith(MODEL)}
    if not expected or there != expected:
        odd = next(iter(sorted(there ^ expected)), "it has none").removeprefix(MODEL)
        raise ExportRefused(
            f"the checkpoint's weights are not those of the run's model ({odd}): was model.name replaced, or model.lora "
            "changed, since the run?"
        )


def _check_shapes(reader: ShardReader, parameters: Mapping[str, Tensor]) -> None:
    for name, tensor in parameters.items():
        if reader.shapes[name] != tuple(tensor.shape):
            raise ExportRefused(
                f"{name.removeprefix(MODEL)} has shape {list(reader.shapes[name])} in the checkpoint and {list(tensor.shape)} "
                "in the run's model: was model.name replaced since the run?"
            )


def _step(text: str) -> int | str:
    if text in ("latest", "all"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a step: give a number from 1, `latest` or `all`")
