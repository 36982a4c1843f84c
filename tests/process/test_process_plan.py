"""The plan: which processes, with which GPUs, threads and variables. Nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope._launch.process_plan import (
    Host,
    LaunchPlan,
    PlanError,
    ProcessPlan,
    choose_device,
    describe_shared_gpus,
    make_plan,
    read_plan,
    share_threads,
    write_plan,
)
from telescope.config.run import RunConfig
from telescope.config.sections import ClusterSettings, EnvironmentEntry, InferenceSettings
from telescope.trainer.main import placement

LAPTOP = Host("laptop", cpus=2)
EIGHT = Host("node-1", cpus=32, gpus=tuple("01234567"))


def config_with(**cluster: object) -> RunConfig:
    return RunConfig(
        environments={"countdown": EnvironmentEntry(name="countdown")},
        algorithm={"name": "grpo"},
        backend={"name": "fsdp"},
        cluster=ClusterSettings(**cluster),
    )


def by_name(plan: LaunchPlan) -> dict[str, ProcessPlan]:
    return {process.name: process for process in plan.processes}


def test_a_run_has_one_orchestrator_and_as_many_of_the_rest_as_asked() -> None:
    plan = make_plan(config_with(inference_num_workers=2, trainer_num_workers=3, env_num_workers=1), (LAPTOP,))
    assert plan.names == ("orchestrator", "server-0", "server-1", "trainer-0", "trainer-1", "trainer-2", "worker-0")
    assert by_name(plan)["worker-0"].program == ("-m", "telescope.workers")


def test_gpus_go_to_servers_first_then_to_ranks_and_to_nobody_else() -> None:
    plan = make_plan(config_with(inference_num_workers=3, trainer_num_workers=2), (EIGHT,))
    visible = {process.name: process.environment["CUDA_VISIBLE_DEVICES"] for process in plan.processes}
    assert plan.device == "gpu"
    assert [visible.pop(name) for name in ("server-0", "server-1", "server-2")] == ["0", "1", "2"]
    assert [visible.pop(name) for name in ("trainer-0", "trainer-1")] == ["3", "4"]
    assert visible == {"orchestrator": "", "worker-0": ""}


def test_device_cpu_hides_the_gpus_of_a_gpu_host() -> None:
    plan = make_plan(config_with(device="cpu"), (EIGHT,))
    assert plan.device == "cpu"
    assert {process.environment["CUDA_VISIBLE_DEVICES"] for process in plan.processes} == {""}


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        PlanError, match=r"inference_num_workers=9 and cluster\.trainer_num_workers=4 need 13 GPUs.*or 9 where.*node-1 has 8"
    ):
        make_plan(config_with(inference_num_workers=9, trainer_num_workers=4), (EIGHT,))


def test_one_gpu_is_shared_by_a_server_and_a_rank_and_said() -> None:
    plan = make_plan(config_with(inference_num_workers=1, trainer_num_workers=1), (Host("box", 8, ("0",)),))
    assert {process.name: process.gpus for process in plan.processes if process.gpus} == {
        "server-0": ("0",),
        "trainer-0": ("0",),
    }
    assert describe_shared_gpus(plan).startswith(
        "server-0 and trainer-0 share GPU 0: inference.gpu_memory_utilization must leave"
    )


def test_a_fake_run_takes_no_gpu_unless_it_is_told_to() -> None:
    """Its backend has weights of its own, which no transport between GPUs knows."""
    for device, chosen in (("auto", "cpu"), ("gpu", "gpu")):
        config = RunConfig(
            environments={"countdown": EnvironmentEntry(name="countdown")},
            algorithm={"name": "grpo"},
            backend={"name": "fake"},
            inference=InferenceSettings(engine="fake"),
            cluster=ClusterSettings(device=device),
        )
        assert make_plan(config, (EIGHT,)).device == chosen


def test_no_two_servers_and_no_two_ranks_share_a_gpu() -> None:
    plan = make_plan(config_with(inference_num_workers=6, trainer_num_workers=4), (EIGHT,))
    for role, count in (("server", 6), ("trainer", 4)):
        assert len({process.gpus for process in plan.processes if process.role == role}) == count
    assert describe_shared_gpus(make_plan(config_with(inference_num_workers=4, trainer_num_workers=4), (EIGHT,))) == ""


def test_device_gpu_on_a_host_without_one_is_refused() -> None:
    with pytest.raises(PlanError, match=r"laptop has 0: ask for fewer, or set cluster\.device=cpu"):
        choose_device(ClusterSettings(device="gpu"), LAPTOP)


def test_ranks_get_torchs_variables() -> None:
    rank = by_name(make_plan(config_with(trainer_num_workers=2), (LAPTOP,)))["trainer-1"].environment
    assert [rank[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["1", "1", "2", "127.0.0.1"]


@pytest.mark.parametrize(
    ("servers", "ranks", "hints", "cpus", "threads"),
    [
        (1, 1, (4.0, 4.0), 32, (4, 4)),  # enough cores: the hints
        (2, 2, (4.0, 4.0), 8, (2, 2)),  # half of what is hinted
        (1, 1, (4.0, 4.0), 2, (1, 1)),
        (1, 1, (0.5, 0.5), 2, (1, 1)),  # never fewer than one
        (1, 3, (2.0, 4.0), 7, (1, 2)),
    ],
)
def test_threads_follow_the_hints_as_far_as_the_cores_go(
    servers: int, ranks: int, hints: tuple[float, float], cpus: int, threads: tuple[int, int]
) -> None:
    cluster = ClusterSettings(
        inference_num_workers=servers,
        trainer_num_workers=ranks,
        inference_cpus_per_worker=hints[0],
        trainer_cpus_per_worker=hints[1],
    )
    shared = share_threads(cluster, cpus)
    assert (shared["server"], shared["trainer"]) == threads


def test_the_users_variables_reach_every_process_and_win() -> None:
    plan = make_plan(config_with(env={"HF_HOME": "/models", "OMP_NUM_THREADS": "3"}), (LAPTOP,))
    assert {process.environment["HF_HOME"] for process in plan.processes} == {"/models"}
    assert {process.environment["OMP_NUM_THREADS"] for process in plan.processes} == {"3"}


def test_variables_that_the_launcher_owns_are_refused() -> None:
    with pytest.raises(PlanError, match=r"cluster\.env sets RANK, WORLD_SIZE"):
        make_plan(config_with(env={"WORLD_SIZE": "4", "RANK": "0"}), (LAPTOP,))


def test_a_plan_survives_its_file_which_only_its_owner_reads(tmp_path: Path) -> None:
    plan = make_plan(config_with(), (LAPTOP,))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600


def test_a_tensor_parallel_server_takes_its_cards_together() -> None:
    config = config_with(inference_num_workers=4, trainer_num_workers=2)
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"tensor_parallel_size": 2})})
    gpus = {process.name: process.gpus for process in make_plan(config, (EIGHT,)).processes if process.gpus}
    assert gpus == {"server-0": ("0", "1"), "server-1": ("2", "3"), "trainer-0": ("4",), "trainer-1": ("5",)}


def with_share(share: float) -> RunConfig:
    config = config_with(inference_num_workers=1, trainer_num_workers=1)
    return config.model_copy(update={"inference": config.inference.model_copy(update={"gpu_memory_utilization": share})})


def test_a_rank_beside_a_server_may_take_what_the_server_leaves_of_the_card() -> None:
    box = Host("box", 8, ("0",))
    environment = by_name(make_plan(with_share(0.45), (box,)))["trainer-0"].environment
    assert environment["TELESCOPE_GPU_SHARE"] == "0.550"
    assert placement(environment, with_share(0.45).cluster).memory_share == 0.55
    alone = by_name(make_plan(with_share(0.45), (EIGHT,)))["trainer-0"].environment
    assert "TELESCOPE_GPU_SHARE" not in alone
    with pytest.raises(PlanError, match=r"trainer-0 shares GPU 0 with a server, and inference.gpu_memory_util.*=0.95"):
        make_plan(with_share(0.95), (box,))
