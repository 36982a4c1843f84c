"""Which arguments vLLM gets, from settings alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from telescope.config.models import EMBEDDED
from telescope.config.sections import InferenceSettings, LoraSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.options import (
    Device,
    NoRoom,
    ServerPlan,
    engine_arguments,
    logprob_bytes,
    share_beside,
    spare_bytes,
    vllm_environment,
)
from telescope.weights.transport_choice import transport_named

TINY_BYTES = 2 * 234_080
TINY_VECTORS = 2 * (2 * 96 + 2 * 32) + 96
"""Elements of its norms: in a staging buffer there is room for them in float32."""
"""The embedded model's parameters in bfloat16; its tensors leave no gaps."""
TINY_VECTORS = 2 * (2 * 96 + 2 * 32) + 96
"""Elements of norms: room is kept for them in float32."""
LARGEST_TENSOR = 2 * 64 * 384


def arguments(device: Device = "cpu", lanes: int = 256, dtype: str = "float32", **settings: object) -> dict[str, object]:
    model = ModelSettings(name="tiny", dtype=dtype)
    return engine_arguments(ServerPlan(model, Path("/m"), InferenceSettings(**settings), device, lanes, 0, "run"))


def test_routing_is_listened_to_only_where_a_run_asks_for_it():
    plan = ServerPlan(ModelSettings(), Path("/m"), InferenceSettings(), "cpu", 8, 0, "run")
    assert [engine_arguments(replace(plan, router_replay=on))["worker_extension_cls"] for on in (False, True)] == [
        "telescope.inference.vllm.worker_extension.WeightExtension",
        "telescope.inference.vllm.routing_extension.RoutingExtension",
    ]


def test_on_a_cpu_the_master_precision_is_served_and_on_a_gpu_bfloat16():
    assert arguments()["dtype"] == "float32"
    assert arguments("gpu")["dtype"] == "bfloat16"
    assert arguments("gpu", dtype="float32")["dtype"] == "bfloat16"
    assert (
        engine_arguments(ServerPlan(ModelSettings(), Path("/m"), InferenceSettings(dtype="float32"), "gpu", 1, 0, "run"))[
            "dtype"
        ]
        == "float32"
    )


@pytest.mark.parametrize(("device", "lanes", "expected"), [("cpu", 64, 64), ("cpu", 4096, 256), ("gpu", 4096, 1024)])
def test_a_step_carries_as_many_sequences_as_may_be_in_flight_up_to_the_devices_measure(device, lanes, expected):
    assert arguments(device, lanes)["max_num_seqs"] == expected


def test_what_is_set_goes_through():
    given = arguments("gpu", max_num_seqs=7, max_num_batched_tokens=99, cuda_graphs="off", scheduling_policy="fcfs")
    assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == (7, 99)
    assert (given["enforce_eager"], given["scheduling_policy"]) == (True, "fcfs")
    assert "max_num_batched_tokens" not in arguments("gpu")


def test_a_cpu_server_is_eager_in_one_process_with_a_small_cache():
    given = arguments(cpu_kv_cache_mb=64)
    assert (given["enforce_eager"], given["distributed_executor_backend"]) == (True, "uni")
    assert given["kv_cache_memory_bytes"] == 64 * 2**20
    assert "gpu_memory_utilization" not in given


def test_log_probs_are_asked_for_after_temperature():
    assert arguments()["logprobs_mode"] == "processed_logprobs"


def test_the_users_taste_is_kept_and_what_is_needed_is_not_up_to_taste():
    made = vllm_environment("cpu", {"OMP_NUM_THREADS": "4", "VLLM_SERVER_DEV_MODE": "1"})
    assert "OMP_NUM_THREADS" not in made
    assert made["VLLM_SERVER_DEV_MODE"] == "0"
    assert vllm_environment("cpu", {})["OMP_NUM_THREADS"] == "1"


def test_the_process_with_a_fake_engine_needs_neither_torch_nor_vllm():
    code = "import sys, telescope.inference.main; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "[]"


def test_decode_steps_are_captured_on_a_gpu_without_compilation_unless_one_asks_for_another_way():
    auto, asked = arguments("gpu", lanes=100), arguments("gpu", lanes=100, cuda_graphs="full_decode")
    assert auto == asked
    assert auto["enforce_eager"] is False
    assert auto["compilation_config"] == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100],
    }
    assert arguments("gpu", lanes=4096)["compilation_config"]["cudagraph_capture_sizes"][-2:] == [384, 512]
    assert arguments("gpu", lanes=1)["compilation_config"]["cudagraph_capture_sizes"] == [1]
    assert "compilation_config" not in arguments("gpu", cuda_graphs="default")
    assert arguments("gpu", cuda_graphs="off")["enforce_eager"] is True
    assert arguments("cpu", cuda_graphs="full_decode")["enforce_eager"] is True


def test_a_tensor_parallel_server_has_its_size_and_on_a_cpu_a_process_a_worker():
    assert "tensor_parallel_size" not in arguments("gpu")
    assert arguments("gpu", tensor_parallel_size=2)["tensor_parallel_size"] == 2
    given = arguments("cpu", tensor_parallel_size=2)
    assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")


def test_spans_go_to_the_receiver_of_this_machine_where_tracing_is_on():
    assert "otlp_traces_endpoint" not in arguments()
    assert arguments(enable_tracing=True)["otlp_traces_endpoint"] == "http://127.0.0.1:4318/v1/traces"
    assert arguments(enable_tracing=True, otlp_receiver_port=9)["otlp_traces_endpoint"] == "http://127.0.0.1:9/v1/traces"
    assert vllm_environment("gpu", {})["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"


def test_a_reasoning_parser_is_the_engines_too():
    assert arguments(reasoning_parser="qwen3")["reasoning_parser"] == "qwen3"
    assert "reasoning_parser" not in arguments()


def test_fp8_is_asked_of_vllm_by_name():
    assert "quantization" not in arguments("gpu")
    assert arguments("gpu", quantization="fp8")["quantization"] == "fp8"


def test_adapters_get_slots_for_the_versions_in_use_and_room_for_their_rank():
    model = ModelSettings(lora=LoraSettings(rank=12))
    given = engine_arguments(ServerPlan(model, Path("/m"), InferenceSettings(max_loras=3), "gpu", 8, 0, "run"))
    assert [given[name] for name in ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras")] == [True, 16, 3, 4]
    assert "enable_lora" not in arguments("gpu")


def test_the_buffers_of_updates_are_charged_against_the_servers_share_of_the_card():
    assert share_beside(0.9, 80 * 10**9, 6 * 10**9, 6 * 10**9, "weight_sync.staging=full") == pytest.approx(0.825)


def test_a_token_of_each_request_has_a_float_for_its_log_prob():
    plan = ServerPlan(ModelSettings(), EMBEDDED / "tiny", InferenceSettings(max_model_len=4096), "gpu", 600, 0, "run")
    assert logprob_bytes(plan) == 4 * 600 * 4097
    settings = InferenceSettings(max_model_len=100, max_num_seqs=7)
    assert logprob_bytes(replace(plan, inference=settings)) == 4 * 7 * 101


def test_a_buffer_that_leaves_no_room_is_refused_with_the_numbers_and_the_remedy():
    with pytest.raises(NoRoom, match=r"=full needs 8.00 GB beside 8.00 GB of weights, and .*=0.6 gives the server 14.40 of"):
        share_beside(0.6, 24 * 10**9, 8 * 10**9, 8 * 10**9, "weight_sync.staging=full")


@pytest.mark.parametrize(
    ("transport", "staging", "spare"),
    [
        ("nccl", "full", TINY_BYTES + TINY_VECTORS * 2),
        ("cuda_ipc", "full", TINY_BYTES + TINY_VECTORS * 2),
        ("nccl", "none", 2 * TINY_BYTES),  # one bucket holds all of it
        ("nccl", "host", 2 * TINY_BYTES),
        ("cuda_ipc", "none", 0),
        ("shared_memory", "host", 0),
    ],
)
def test_what_updates_need_on_a_card_beside_vllm(transport: str, staging: str, spare: int):
    by = transport_named(transport)
    plan = ServerPlan(ModelSettings(), EMBEDDED / "tiny", InferenceSettings(), "gpu", 8, 0, "run", transport=by)
    sync = WeightSyncSettings.model_validate({"staging": staging})
    assert spare_bytes(plan, sync) == spare
    if spare == 2 * TINY_BYTES:
        by_tensor = spare_bytes(plan, sync.model_copy(update={"mode": "per_tensor"}))
        assert by_tensor == 2 * LARGEST_TENSOR


def test_a_server_that_may_sleep_asks_vllm_for_it_on_a_gpu_alone():
    assert arguments("gpu", sleep_while_training="drop_weights")["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in arguments("gpu")
    assert "enable_sleep_mode" not in arguments("cpu", sleep_while_training="keep_weights")
