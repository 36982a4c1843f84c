"""What a run would refuse on this machine alone: `telescope.run` before it starts anything, `telescope check` in a remark."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from telescope._launch.preflight import find_obstacles, refuse
from telescope._launch.process_plan import Host, LaunchPlan, PlanError, make_plan
from telescope.backends.common import attention_choice
from telescope.cli import check, run
from telescope.inference.engine import EngineRefused
from telescope.inference.main import build_engine
from tests.config.conftest import compose_one

ON_CPU = [
    (
        "weight_sync.transport=nccl",
        "weight_sync.transport=nccl needs GPUs, and this run is on CPUs: set weight_sync.transport=auto",
    ),
    (
        "weight_sync.transport=cuda_ipc",
        "weight_sync.transport=cuda_ipc needs GPUs, and this run is on CPUs: set weight_sync.transport=auto",
    ),
    (
        "backend.attention=flash3",
        "backend.attention=flash3 computes in bfloat16 or float16 on a GPU, not float32 on cpu: use sdpa, or auto",
    ),
    ("backend.attention=flex", "backend.attention=flex trains on a GPU only, not on cpu: use sdpa, or auto"),
    ("backend=megatron", "backend=megatron trains on GPUs alone, and there is none for the trainer's ranks: set backend=fsdp"),
    (
        "backend.offload=optimizer",
        "cluster.device=auto means cpu here. backend.offload=optimizer frees the memory of a GPU, and cluster.device=cpu has "
        "none: leave it out",
    ),
    (
        "inference.quantization=fp8",
        "inference.quantization=fp8 needs a GPU, and this run is on CPUs: leave it out",
    ),
]
CPU = Host("a", cpus=4)
GPUS = Host("a", cpus=4, gpus=("0", "1"))


def config_of(*overrides: str):
    found = compose_one(*overrides)
    assert found.config is not None, found.problems
    return found.config


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope._launch.this_host.list_installed_gpus", lambda: ())


@pytest.mark.parametrize(("override", "sentence"), ON_CPU)
def test_check_remarks_what_run_refuses_and_both_say_the_same(
    override: str, sentence: str, without_gpus, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert check.main([override]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{override}: valid, hash ")
    assert f"  On this machine `telescope run` would refuse it: {sentence}\n" in said.out
    assert run.main([override]) == 1
    assert capsys.readouterr().err == f"{sentence}\nNothing was started.\n"
    assert list(tmp_path.iterdir()) == []


def test_all_that_a_machine_lacks_is_said_at_once_and_nothing_of_a_run_that_fits(without_gpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run.main(["inference.quantization=fp8", "weight_sync.transport=nccl"]) == 1
    assert capsys.readouterr().err.count("this run is on CPUs") == 2
    assert check.main([]) == 0
    assert "would refuse" not in capsys.readouterr().out


def test_a_model_that_the_hub_does_not_give_is_a_remark_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert check.main(["model.name=nobody/has-it"]) == 0
    assert "On this machine `telescope run` would refuse it: model.name=nobody/has-it is not in the Hugging Face cache" in (
        capsys.readouterr().out
    )


def test_slurms_clients_are_a_remark_on_a_machine_without_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.main(["cluster=slurm"]) == 0
    assert "On this machine `telescope run` would refuse it: cluster=slurm " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "host", "capability", "found"),
    [
        (("backend.attention=flash3", "backend.mixed_precision_dtype=bfloat16"), GPUS, 9, []),
        (("backend.attention=flash3", "backend.mixed_precision_dtype=bfloat16"), GPUS, None, []),
        (
            ("backend.attention=flash3", "backend.mixed_precision_dtype=bfloat16"),
            GPUS,
            8,
            ["backend.attention=flash3 needs a GPU of compute capability exactly 9, and this one has 8: use flash2, or auto"],
        ),
        (
            ("backend.attention=varlen", "backend.mixed_precision_dtype=null"),
            GPUS,
            9,
            ["backend.attention=varlen computes in bfloat16 or float16 on a GPU, not float32 on cuda:0: use flex, or auto"],
        ),
        (("weight_sync.transport=nccl", "inference.quantization=fp8", "algorithm.use_tis=true"), GPUS, 9, []),
        (
            ("weight_sync.transport=gloo",),
            GPUS,
            9,
            ["weight_sync.transport=gloo is for CPUs; on GPUs set weight_sync.transport=auto"],
        ),
        (("inference=fake", "backend=fake", "weight_sync.transport=auto"), CPU, None, []),
    ],
)
def test_the_plan_and_the_cards_decide(overrides, host: Host, capability, found, monkeypatch):
    monkeypatch.setattr("telescope._launch.preflight.find_compute_capability", lambda: capability)
    monkeypatch.setattr(attention_choice, "installed", lambda: frozenset(attention_choice.PACKAGES.values()))
    config = config_of(*overrides)
    assert find_obstacles(config, make_plan(config, (host,))) == found


def test_of_other_hosts_only_what_the_plan_says_is_judged(monkeypatch):
    """The head, or a login node, has neither their cards nor their packages."""
    monkeypatch.setattr("telescope._launch.preflight.find_compute_capability", lambda: pytest.fail("looked at this machine"))
    monkeypatch.setattr(attention_choice, "installed", lambda: frozenset())
    config = config_of("backend.attention=flash3", "backend.mixed_precision_dtype=bfloat16")
    plan: LaunchPlan = make_plan(config, (GPUS,))
    assert find_obstacles(config, plan, elsewhere=True) == []
    with pytest.raises(PlanError, match="computes in bfloat16 or float16 on a GPU, not bfloat16 on cpu"):
        refuse(config, make_plan(config, (CPU,)), elsewhere=True)


def test_a_server_on_a_cpu_says_of_fp8_what_the_run_would():
    with pytest.raises(EngineRefused, match=r"inference.quantization=fp8 needs a GPU, and this run is on CPUs: leave it out"):
        build_engine(config_of("inference.quantization=fp8"), "run", "cpu")


def test_cards_are_asked_only_where_the_answer_matters(monkeypatch):
    """Each question starts nvidia-smi, and a sweep has many points."""
    monkeypatch.setattr("telescope._launch.preflight.find_compute_capability", lambda: pytest.fail("asked for nothing"))
    for attention in ("auto", "sdpa"):
        config = config_of(f"backend.attention={attention}")
        assert find_obstacles(config, make_plan(config, (GPUS,))) == []


def test_check_tells_of_a_directory_that_a_run_would_not_take(tmp_path: Path, capsys):
    (tmp_path / "kept.txt").write_text("of another run")
    assert check.main(["experiment=fake", f"run_dir={tmp_path}"]) == 0
    assert f"would refuse it: run_dir={tmp_path} exists and is not empty" in capsys.readouterr().out
    assert check.main(["experiment=fake", f"run_dir={tmp_path}", "checkpoint.resume=true"]) == 0
    assert "exists and is not empty" not in capsys.readouterr().out


def test_check_says_that_a_sweepers_points_are_not_known_yet(capsys):
    assert check.main(["-m", "hydra/sweeper=optuna", "seed=1,2"]) == 2
    assert "hydra/sweeper chooses its points while the sweep goes on" in capsys.readouterr().err


def test_a_host_that_does_not_reach_itself_is_refused_at_once(monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(attention_choice, "installed", lambda: frozenset())
    config = config_of("inference=fake", "backend=fake")
    plan = make_plan(config, (CPU,))
    assert find_obstacles(config, plan) == []
    monkeypatch.setattr("telescope._launch.preflight.socket.create_connection", unreachable)
    (sentence,) = find_obstacles(config, plan)
    assert sentence.startswith("127.0.0.1, over which the processes of a run talk, can't be reached on this host (Network is")
