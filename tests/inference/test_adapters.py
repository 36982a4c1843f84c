"""Adapters on the server's side, without an engine: what is whole, what is written, and who goes when."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from telescope.config.sections import InferenceSettings, LoraSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import WeightsRefused
from telescope.inference.vllm.adapters import (
    LoraAdapters,
    Proof,
    disagreements,
    distance,
    expected_tensors,
    largest_change,
    up_projections,
    vllm_rank,
    write_adapter,
)
from telescope.inference.vllm.lora_engine import LoraEngine
from telescope.inference.vllm.options import ServerPlan
from telescope.records import TensorSpec, WeightManifest
from telescope.weights.buckets import ModelTensor
from telescope.weights.transports.disk import DiskPublisher
from tests.inference.models import make_model

LORA = LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
CHECKPOINT = {
    "model.embed_tokens.weight": (98, 64),
    "model.layers.0.self_attn.q_proj.weight": (128, 64),
    "model.layers.0.self_attn.q_proj.bias": (128,),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 256),
}
Q, DOWN = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.mlp.down_proj"


def manifest(*names: str, version: int = 1, shape: tuple[int, ...] = (1,), dtype: str = "float32") -> WeightManifest:
    shapes = expected_tensors(LORA, CHECKPOINT)
    specs = tuple(TensorSpec(name, dtype, shapes.get(name, shape), 0, 0) for name in names)
    return WeightManifest(version=version, transport="t", location="", tensors=specs, nbytes=0, checksum="")


def test_each_targeted_matrix_has_an_a_of_rank_by_in_and_a_b_of_out_by_rank():
    assert expected_tensors(LORA, CHECKPOINT) == {
        f"{Q}.lora_A.weight": (4, 64),
        f"{Q}.lora_B.weight": (128, 4),
        f"{DOWN}.lora_A.weight": (4, 256),
        f"{DOWN}.lora_B.weight": (64, 4),
    }


def test_a_part_a_stranger_and_a_wrong_dtype_are_told():
    expected = expected_tensors(LORA, CHECKPOINT)
    assert disagreements(manifest(*expected), expected) == []
    assert disagreements(manifest(*list(expected)[1:]), expected) == [f"1 tensors are missing: {Q}.lora_A.weight"]
    assert disagreements(manifest(*expected, "x"), expected) == ["1 tensors are not the adapter's: x"]
    assert len(disagreements(manifest(*expected, dtype="int8"), expected)) == 4


def test_what_is_written_is_read_back_by_safetensors_and_says_rank_and_alpha(tmp_path: Path):
    names = list(expected_tensors(LORA, CHECKPOINT))
    arrays = {name: np.full(expected_tensors(LORA, CHECKPOINT)[name], i, np.float32) for i, name in enumerate(names)}
    specs = [TensorSpec(n, "float32", a.shape, 0, a.nbytes) for n, a in arrays.items()]
    pairs = [(spec, memoryview(arrays[spec.name].reshape(-1).view(np.uint8))) for spec in specs]
    write_adapter(tmp_path / "new", LORA, pairs)
    found = load_file(tmp_path / "new" / "adapter_model.safetensors")
    assert sorted(found) == sorted(arrays)
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    text = (tmp_path / "new" / "adapter_config.json").read_text()
    assert '"r": 4' in text
    assert '"lora_alpha": 8' in text
    ups = up_projections(pairs)
    assert ups.shape == ((128 + 64) * 4,)
    assert set(ups.tolist()) == {1.0, 3.0}


def test_bfloat16_is_read_as_numbers():
    spec = TensorSpec("x.lora_B.weight", "bfloat16", (2,), 0, 4)
    view = memoryview(np.array([0x3F80, 0xC000], np.uint16).view(np.uint8))  # 1 and -2
    assert up_projections([(spec, view)]).tolist() == [1.0, -2.0]


def test_the_first_adapter_is_compared_with_doing_nothing():
    assert largest_change(None, np.zeros(3, np.float32)) == 0.0
    assert largest_change(None, np.array([1.0, -2.0], np.float32)) == 2.0
    assert largest_change(np.array([1.0, 1.0], np.float32), np.array([1.5, 1.0], np.float32)) == 0.5


def test_the_distance_of_two_probes_is_that_of_the_tokens_both_know():
    assert distance({1: -1.0, 2: -2.0}, {2: -2.5, 3: -1.0}) == 0.5
    assert distance({1: -1.0}, {2: -1.0}) == float("inf")


@pytest.mark.parametrize(("dtype", "small", "large"), [("float32", 9e-7, 2e-6), ("bfloat16", 9e-4, 2e-3)])
def test_changes_that_move_nothing_add_up_until_they_are_refused(dtype: str, small: float, large: float):
    still, other = {1: -1.0, 2: -2.0}, {1: -1.0, 2: -2.25}
    proof = Proof(dtype, still)
    assert proof.judge(np.zeros(2, np.float32), still) == (0.0, 0.0)
    assert proof.judge(np.array([0, small], np.float32), still) == (pytest.approx(small), 0.0)
    with pytest.raises(ValueError, match="from the last one that was seen to act, but the log-probs of a probe did not move"):
        proof.judge(np.array([0, large], np.float32), still)
    assert proof.judge(np.array([0, large], np.float32), other) == (pytest.approx(large), 0.25)
    assert proof.judge(np.array([0, large + small], np.float32), other) == (pytest.approx(small, rel=1e-2), 0.0)


def test_a_version_stays_until_its_last_request_has_ended(tmp_path: Path):
    adapters = LoraAdapters(tmp_path)
    base = adapters.begin("old")
    serve(adapters, 1)
    first = adapters.begin("a")
    serve(adapters, 2)
    assert (base.version, first.version, adapters.begin("b").version) == (0, 1, 2)
    assert adapters.used_by("a") is first
    assert adapters.unused() == []
    first.requests.discard("a")
    assert adapters.unused() == [first]
    adapters.gone(first)
    assert adapters.unused() == []
    base.requests.discard("old")
    assert adapters.unused() == []  # the base model is nothing to unload


def test_the_oldest_versions_requests_make_way_where_slots_are_short(tmp_path: Path):
    adapters = LoraAdapters(tmp_path)
    adapters.begin("base")  # without an adapter it takes no slot
    for version in (1, 2, 3):
        serve(adapters, version)
        adapters.begin(f"of {version}")
        adapters.begin(f"also of {version}")
    assert adapters.in_the_way(4) == set()
    assert adapters.in_the_way(3) == {"of 1", "also of 1"}
    assert adapters.in_the_way(2) == {"of 1", "also of 1", "of 2", "also of 2"}


def test_a_server_started_again_begins_with_an_empty_folder(tmp_path: Path):
    killed = LoraAdapters(tmp_path).new(manifest(version=1))
    killed.folder.mkdir()
    again = LoraAdapters(tmp_path).new(manifest(version=1))
    assert again.folder == killed.folder
    assert not again.folder.exists()


def test_no_number_is_used_twice_though_a_version_may_come_again(tmp_path: Path):
    adapters = LoraAdapters(tmp_path)
    one, two = adapters.new(manifest(version=7)), adapters.new(manifest(version=7))
    assert (one.number, two.number) == (1, 2)
    assert one.name != two.name
    assert one.folder != two.folder


@pytest.mark.parametrize(("rank", "known"), [(1, 1), (2, 8), (8, 8), (12, 16), (512, 512)])
def test_vllm_gets_the_next_rank_that_it_knows(rank: int, known: int):
    assert vllm_rank(rank) == known


def serve(adapters: LoraAdapters, version: int) -> None:
    adapters.staged = adapters.new(manifest(version=version))
    adapters.serve_staged()


class Slow(LoraEngine):
    """Never comes to an end of loading."""

    async def _load_beside(self, manifest: WeightManifest):
        await asyncio.Event().wait()


async def test_an_adapter_that_is_being_loaded_can_be_broken_off_and_the_old_one_serves(tmp_path: Path):
    folder = make_model(tmp_path / "model", 0)
    plan = ServerPlan(ModelSettings(name=str(folder), lora=LORA), folder, InferenceSettings(), "cpu", 4, 0, "run")
    engine = Slow(plan, WeightSyncSettings(update_timeout_s=3600), tmp_path / "scratch")
    preparing = asyncio.create_task(engine.prepare(manifest(version=3)))
    await asyncio.sleep(0)
    assert (await engine.discard(3)).prepared is None
    with pytest.raises(WeightsRefused, match="version 3 was broken off"):
        await preparing
    again = asyncio.create_task(engine.prepare(manifest(version=3)))
    await asyncio.sleep(0)
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again


def published(folder: Path) -> tuple[LoraEngine, WeightManifest]:
    """An engine without vLLM, and a whole adapter in a file."""
    make_model(folder / "model", seed=1)
    plan = ServerPlan(ModelSettings(name="model", lora=LORA), folder / "model", InferenceSettings(), "cpu", 8, 0, "run")
    engine = LoraEngine(plan, WeightSyncSettings(), folder / "scratch")
    arrays = [(name, np.ones(shape, np.float32)) for name, shape in engine._expected.items()]
    layout = [ModelTensor(name, "float32", array.shape) for name, array in arrays]
    return engine, DiskPublisher(folder / "versions", lambda: layout).publish(1, arrays)


@pytest.mark.asyncio
async def test_half_an_adapter_leaves_a_full_disk_as_it_was(tmp_path: Path):
    """A limit on the size of files stands for the disk."""
    engine, version = published(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(WeightsRefused, match=r"the adapter of version 1 can't be written: .*File too large"):
            await engine._write_adapter(version)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (await engine._write_adapter(version)).folder is not None


@pytest.mark.asyncio
async def test_an_adapter_that_was_broken_off_while_it_was_read_goes_when_it_is_written(tmp_path: Path):
    """The disk hangs: here a pipe that nobody has filled yet."""
    engine, version = published(tmp_path)
    content, pipe = Path(version.location).read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = asyncio.create_task(engine._write_adapter(msgspec.structs.replace(version, location=str(pipe))))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await writing
    await asyncio.to_thread(pipe.write_bytes, content)
    scratch = tmp_path / "scratch"
    async with asyncio.timeout(60):
        while not scratch.exists() or list(scratch.iterdir()):
            await asyncio.sleep(0.01)


class _Vllm:
    """The engine: loading takes for ever, unloading until it may end."""

    def __init__(self) -> None:
        self.asked, self.begun, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.unloaded: list[int] = []

    async def add_lora(self, request: object) -> None:
        self.asked.set()
        await asyncio.Event().wait()

    async def remove_lora(self, number: int) -> None:
        self.begun.set()
        await self.may_end.wait()
        self.unloaded.append(number)


async def _until_empty(folder: Path) -> None:
    async with asyncio.timeout(30):
        while list(folder.iterdir()):
            await asyncio.sleep(0.005)


async def test_an_adapter_whose_writing_is_broken_off_is_gone_before_the_rest_is_written(tmp_path: Path, monkeypatch):
    """The disk takes the first tensor, and the next when the order to break off has come."""
    engine, version = published(tmp_path)
    begun, go, seen = threading.Event(), threading.Event(), []

    class Held:
        def __init__(self, called_off: threading.Event) -> None:
            self.called_off = called_off

        def is_set(self) -> bool:
            seen.append(len(seen))
            if len(seen) == 2:
                begun.set()
                assert go.wait(30)
            return self.called_off.is_set()

    def held_up(folder, lora, tensors, called_off) -> None:
        write_adapter(folder, lora, tensors, Held(called_off))  # type: ignore[arg-type]

    monkeypatch.setattr("telescope.inference.vllm.lora_engine.write", held_up)
    writing = asyncio.create_task(engine._write_adapter(version))
    assert await asyncio.to_thread(begun.wait, 30)
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    go.set()
    await _until_empty(tmp_path / "scratch")
    assert len(seen) == 2 < len(version.tensors)


async def test_an_adapter_that_is_broken_off_twice_is_unloaded_and_its_folder_removed(tmp_path: Path):
    engine, version = published(tmp_path)
    engine._llm = vllm = _Vllm()
    loading = asyncio.create_task(engine._load_beside(version))
    await asyncio.wait_for(vllm.asked.wait(), 30)
    loading.cancel()
    await vllm.begun.wait()
    loading.cancel()
    vllm.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await _until_empty(tmp_path / "scratch")
    assert vllm.unloaded == [1]


async def test_older_adapters_whose_unloading_is_broken_off_are_unloaded_with_the_next_version(tmp_path: Path):
    engine, version = published(tmp_path)
    engine._llm = vllm = _Vllm()
    for number in (1, 2, 3):
        serve(engine._adapters, number)
    loading = asyncio.create_task(engine._load_beside(version))
    await vllm.begun.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert [adapter.version for adapter in engine._adapters.unused()] == [1, 2]
