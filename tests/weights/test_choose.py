"""What `auto` means where, and what is refused with a remedy."""

from __future__ import annotations

import json

import pytest

from telescope.config.parts import WeightSyncSettings
from telescope.weights.choose import TransportRefused, cards, choose, make_receiver, planned, spread, wire_dtype


def plan(tmp_path, *processes):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"device": "gpu", "processes": [
        {"name": f"{role}-0", "role": role, "host": host, "gpus": gpus, "threads": 1} for role, host, gpus in processes
    ]}))  # fmt: skip
    return path


def test_a_plan_says_whether_servers_and_trainer_share_a_card(tmp_path):
    assert cards(tmp_path / "plan.json") == "apart"
    assert cards(plan(tmp_path, ("orchestrator", "a", []), ("server", "a", []), ("trainer", "a", []))) == "apart"
    assert cards(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "a", ["1"]))) == "apart"
    assert cards(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "b", ["0"]))) == "apart"
    assert cards(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "a", ["0"]))) == "same"
    two = [("server", "a", ["0"]), ("server", "a", ["1"]), ("trainer", "a", ["0"])]
    assert cards(plan(tmp_path, *two)) == "mixed"
    assert cards(plan(tmp_path, *two, ("trainer", "a", ["1"]))) == "mixed"


@pytest.mark.parametrize(
    ("device", "placed", "chosen"),
    [
        ("cpu", "apart", "shared_memory"),
        ("cuda:0", "apart", "nccl"),
        ("cuda:0", "same", "cuda_ipc"),
        ("cuda:0", "mixed", "shared_memory"),
    ],
)
def test_auto_takes_the_fastest_that_works(device, placed, chosen):
    assert choose("auto", device, placed) == chosen


@pytest.mark.parametrize(
    ("transport", "device", "placed"),
    [("nccl", "cpu", "apart"), ("cuda_ipc", "cpu", "apart"), ("nccl", "cuda:0", "same"), ("nccl", "cuda:0", "mixed"),
     ("cuda_ipc", "cuda:0", "apart"), ("gloo", "cuda:0", "apart")],
)  # fmt: skip
def test_what_can_not_work_is_refused_with_the_remedy(transport, device, placed):
    with pytest.raises(TransportRefused, match=rf"weight_sync.transport={transport}.*weight_sync.transport=auto"):
        choose(transport, device, placed)


def test_servers_on_other_hosts_than_rank_0_get_weights_over_the_network(tmp_path):
    assert not spread(tmp_path / "plan.json")
    assert not spread(plan(tmp_path, ("server", "a", ["0"]), ("trainer", "a", ["1"]), ("trainer", "b", ["0"])))
    path = plan(tmp_path, ("server", "a", ["0"]), ("server", "b", ["0"]), ("trainer", "a", ["1"]))
    assert spread(path)
    assert planned("auto", path) == "nccl"
    assert choose("auto", "cpu", "apart", hosts=True) == "gloo"
    assert planned("auto", path, adapters=True) == "disk"
    assert choose("disk", "cpu", "apart", hosts=True) == "disk"


@pytest.mark.parametrize(
    ("transport", "device", "placed"),
    [("shared_memory", "cpu", "apart"), ("shared_memory", "cuda:0", "apart"), ("auto", "cuda:0", "mixed")],
)
def test_shared_memory_is_refused_across_hosts(transport, device, placed):
    with pytest.raises(TransportRefused, match=r"shared memory here, which servers on other hosts do not see: set weight_sync"):
        choose(transport, device, placed, hosts=True)


def test_on_a_gpu_weights_travel_as_what_is_served_and_on_a_cpu_as_they_are_held():
    auto = WeightSyncSettings()
    assert wire_dtype(auto, "cpu", "auto") is None
    assert wire_dtype(auto, "cuda:0", "auto") == "bfloat16"
    assert wire_dtype(auto, "cuda:0", "float32") == "float32"
    assert wire_dtype(WeightSyncSettings(dtype="master"), "cuda:0", "auto") is None
    assert wire_dtype(WeightSyncSettings(dtype="float16"), "cpu", "auto") == "float16"


def test_a_transport_that_is_not_known_here_is_refused():
    with pytest.raises(TransportRefused, match="weights come by 'pigeon'"):
        make_receiver("pigeon", run="r", member="server-0/0", device="cpu", init_timeout_s=1.0)
