"""What `auto` means where, and what is refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telescope.config.run import RunConfig
from telescope.config.sections import LoraSettings, ModelSettings, WeightSyncSettings
from telescope.weights.base import RunPlacement, SharedGpus, TransportRefused
from telescope.weights.transport_choice import automatic, choose, read_placement, transport_named, wire_dtype

ON_CPU = RunPlacement(on_gpu=False)
SEVERAL = "cuda_ipc is for servers and trainer on one and the same GPU, and this run has several: set"


def plan(tmp_path: Path, *processes: tuple[str, str, list[str]]) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"device": "gpu", "processes": [
        {"name": f"{role}-0", "role": role, "host": host, "gpus": gpus, "threads": 1} for role, host, gpus in processes
    ]}))  # fmt: skip
    return path


def run_with(transport: str, *, adapters: bool = False, **sync: object) -> RunConfig:
    """A run of which the transport matters alone."""
    model = ModelSettings(lora=LoraSettings() if adapters else None)
    settings = WeightSyncSettings(transport=transport, **sync)
    return RunConfig.model_construct(weight_sync=settings, model=model, plugin_path=())


def chosen(transport: str, placement: RunPlacement, *, adapters: bool = False, **sync: object) -> str:
    return choose(run_with(transport, adapters=adapters, **sync), placement).name


def gpus(placed: SharedGpus, *, other_hosts: bool = False) -> RunPlacement:
    return RunPlacement(on_gpu=True, gpus=placed, other_hosts=other_hosts)


def test_a_plan_says_whether_servers_and_trainer_share_a_card(tmp_path: Path) -> None:
    assert read_placement(tmp_path / "plan.json") == ON_CPU
    apart = [("orchestrator", "a", []), ("server", "a", []), ("trainer", "a", [])]
    assert read_placement(plan(tmp_path, *apart)).gpus == "apart"
    assert read_placement(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "a", ["1"]))).gpus == "apart"
    assert read_placement(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "b", ["0"]))).gpus == "apart"
    assert read_placement(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "a", ["0"]))).gpus == "same"
    two = [("server", "a", ["0"]), ("server", "a", ["1"]), ("trainer", "a", ["0"])]
    assert read_placement(plan(tmp_path, *two)).gpus == "mixed"
    assert read_placement(plan(tmp_path, *two, ("trainer", "a", ["1"]))).gpus == "mixed"


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        (ON_CPU, "shared_memory"),
        (gpus("apart"), "nccl"),
        (gpus("same"), "cuda_ipc"),
        (gpus("mixed"), "shared_memory"),
    ],
)
def test_auto_takes_the_fastest_that_works(placement: RunPlacement, name: str) -> None:
    assert chosen("auto", placement) == automatic(placement) == name
    assert chosen("auto", placement, adapters=True) == "shared_memory"


@pytest.mark.parametrize(
    ("transport", "placement", "sentence"),
    [
        ("nccl", ON_CPU, "nccl needs GPUs, and this run is on CPUs: set"),
        ("cuda_ipc", ON_CPU, "cuda_ipc needs GPUs, and this run is on CPUs: set"),
        ("nccl", gpus("same"), "nccl refuses two ranks on a card, and here a server and a trainer rank share one: set"),
        ("nccl", gpus("mixed"), "nccl refuses two ranks on a card, and here a server and a trainer rank share one: set"),
        (
            "cuda_ipc",
            gpus("apart"),
            "cuda_ipc is for servers and trainer on one and the same GPU, and this run has several: set",
        ),
        ("gloo", gpus("apart"), "gloo is for CPUs; on GPUs set"),
    ],
)
def test_what_can_not_work_is_refused_with_the_remedy(transport: str, placement: RunPlacement, sentence: str) -> None:
    with pytest.raises(TransportRefused) as refused:
        chosen(transport, placement)
    assert str(refused.value) == f"weight_sync.transport={sentence} weight_sync.transport=auto"


def test_servers_on_other_hosts_than_rank_0_get_weights_over_the_network(tmp_path: Path) -> None:
    assert not read_placement(tmp_path / "plan.json").other_hosts
    same = [("server", "a", ["0"]), ("trainer", "a", ["1"]), ("trainer", "b", ["0"])]
    assert not read_placement(plan(tmp_path, *same)).other_hosts
    placement = read_placement(plan(tmp_path, ("server", "a", ["0"]), ("server", "b", ["0"]), ("trainer", "a", ["1"])))
    assert placement.other_hosts
    assert chosen("auto", placement) == "nccl"
    assert chosen("auto", RunPlacement(on_gpu=False, other_hosts=True)) == "gloo"
    assert chosen("auto", placement, adapters=True) == "disk"
    assert chosen("disk", RunPlacement(on_gpu=False, other_hosts=True)) == "disk"


@pytest.mark.parametrize(
    ("transport", "placement"),
    [
        ("shared_memory", RunPlacement(on_gpu=False, other_hosts=True)),
        ("shared_memory", gpus("apart", other_hosts=True)),
        ("auto", gpus("mixed", other_hosts=True)),
    ],
)
def test_shared_memory_is_refused_across_hosts(transport: str, placement: RunPlacement) -> None:
    with pytest.raises(TransportRefused) as refused:
        chosen(transport, placement)
    assert str(refused.value) == (
        f"weight_sync.transport={transport} is shared memory here, which servers on other hosts do not see: "
        "set weight_sync.transport=disk and weight_sync.dir to a folder that all hosts see, or give servers and ranks GPUs of "
        "their own"
    )


def test_files_in_a_run_directory_that_not_all_hosts_see_are_refused() -> None:
    apart = RunPlacement(on_gpu=False, other_hosts=True, run_dir_on_all=False)
    with pytest.raises(TransportRefused, match=r"which not all hosts see: set weight_sync\.dir"):
        chosen("disk", apart)
    with pytest.raises(TransportRefused, match=r"which not all hosts see: set weight_sync\.dir"):
        chosen("auto", apart, adapters=True)
    assert chosen("disk", apart, dir="/seen/by/all") == "disk"


def test_on_a_gpu_weights_travel_as_what_is_served_and_on_a_cpu_as_they_are_held() -> None:
    auto = WeightSyncSettings()
    assert wire_dtype(auto, "cpu", "auto") is None
    assert wire_dtype(auto, "cuda:0", "auto") == "bfloat16"
    assert wire_dtype(auto, "cuda:0", "float32") == "float32"
    assert wire_dtype(WeightSyncSettings(dtype="master"), "cuda:0", "auto") is None
    assert wire_dtype(WeightSyncSettings(dtype="float16"), "cpu", "auto") == "float16"


def test_a_transport_that_is_not_known_here_is_refused() -> None:
    with pytest.raises(TransportRefused, match=r"weights come by 'pigeon'.*there is no weight transport 'pigeon'"):
        transport_named("pigeon")


def test_only_those_that_carry_adapters_read_them() -> None:
    with pytest.raises(TransportRefused, match=r"weight_sync\.transport=nccl carries no adapters"):
        transport_named("nccl").reader("run")
    assert transport_named("disk").reader("run") is not None
