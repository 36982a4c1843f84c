"""Who decides what `auto` is: the host that starts a run, and in a Slurm job its first node; and what they have looked at."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from telescope._launch import automatic_settings
from telescope._launch.automatic_settings import settle, settle_in_job
from telescope._launch.hosts.node_identity import NodeIdentity
from telescope._launch.process_plan import Host, LaunchPlan, make_plan
from telescope._launch.this_host import SmallestCard
from telescope.cli import check, resume
from telescope.cli.check import main as check_main
from telescope.cli.resume import go_on
from telescope.cli.start import RunOrder
from telescope.config.automatic import Decision, RankCard, Surroundings, find_open
from telescope.config.run import RunConfig, as_json, as_yaml, config_hash, dump_run, load_run
from telescope.runlog.identity import new_identity, read_identity, write_identity
from telescope.runlog.layout import RunDirectory
from tests.config.conftest import compose_one

H200 = SmallestCard("NVIDIA H200", 143_771 << 20, 9)
H100 = SmallestCard("NVIDIA H100 80GB HBM3", 81_559 << 20, 9)
GPU = Surroundings(device="gpu", card=RankCard(name="NVIDIA H200", room=140 << 30, flops=989e12, bandwidth=4.8e12))
TWO = Host("here", cpus=8, gpus=("0", "1"))
ONE_EACH = ("model=qwen3-4b", "cluster.trainer_num_workers=1", "cluster.inference_num_workers=1")


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_settings, "has_compilers", lambda: True)


def planned(*overrides: str, host: Host = TWO) -> tuple[RunConfig, LaunchPlan]:
    config = compose_one(*overrides).config
    assert config is not None
    return config, make_plan(config, (host,))


def chosen(config: RunConfig) -> tuple[object, ...]:
    backend = config.backend
    return config.trainer.seq_len, *(getattr(backend, name) for name in ("compile", "gradient_checkpointing"))


def test_the_host_that_starts_a_run_looks_at_its_own_cards() -> None:
    config, plan = planned(*ONE_EACH)
    assert chosen(settle(config, plan, find_card=lambda: H200).config) == (16_384, True, False)
    assert chosen(settle(config, plan, find_card=lambda: None).config) == (4096, False, True)


def test_on_a_cpu_nobody_looks_and_nothing_is_said() -> None:
    config, plan = planned(*ONE_EACH, host=Host("here", cpus=8))
    found = settle(config, plan, find_card=lambda: pytest.fail("looked at cards"))
    assert (chosen(found.config), found.sentence) == ((4096, False, True), "")


def test_a_rank_that_shares_its_card_has_what_the_server_leaves() -> None:
    """15 % beside a server that has 85, all of it where the server has a card of its own."""
    tight = ("model=qwen3-0.6b", *ONE_EACH[1:], "inference.gpu_memory_utilization=0.85")
    config, plan = planned(*tight, host=Host("here", cpus=8, gpus=("0",)))
    shared = settle(config, plan, find_card=lambda: H200)
    assert f"of {143_771 / 1024 * 0.15:.0f} GiB" in shared.sentence
    alone = settle(*planned(*tight), find_card=lambda: H200)
    assert "of 140 GiB" in alone.sentence


def test_a_version_waits_on_a_shared_card_in_the_servers_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Surroundings] = []

    def note(config: RunConfig, where: Surroundings) -> Decision:
        looked_at.append(where)
        return Decision(config)

    monkeypatch.setattr(automatic_settings, "decide", note)
    for dtype in ("auto", "bfloat16", "float32"):
        shared = planned("model=qwen3-0.6b", *ONE_EACH[1:], f"inference.dtype={dtype}", "inference.gpu_memory_utilization=0.4",
                         host=Host("here", cpus=8, gpus=("0",)))  # fmt: skip
        settle(*shared, find_card=lambda: H200)
    settle(*planned(*ONE_EACH), find_card=lambda: H200)
    assert [where.handed_bytes for where in looked_at] == [2, 2, 4, 0]


@pytest.mark.parametrize(("capability", "compiled"), [(7, False), (8, True), (None, True)])
def test_layers_are_compiled_for_gpus_that_are_not_too_old(capability: int | None, compiled: bool) -> None:
    card = SmallestCard("a card", 141 << 30, capability)
    assert chosen(settle(*planned(*ONE_EACH), find_card=lambda: card).config)[1] is compiled


def test_the_head_of_several_hosts_decides_by_its_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_one(*ONE_EACH).config
    assert config is not None
    monkeypatch.setattr(automatic_settings, "inspect_this_host", lambda: TWO)
    assert chosen(settle(config, None, find_card=lambda: H200).config) == (16_384, True, False)
    spread = config.model_copy(update={"cluster": config.cluster.model_copy(update={"trainer_num_workers": 4})})
    assert "of 140 GiB" in settle(spread, None, find_card=lambda: H200, nodes=3).sentence
    shared = settle(spread, None, find_card=lambda: H200, nodes=2)  # four cards for five processes: a rank has 14 GiB
    assert "nothing fits" in shared.sentence
    monkeypatch.setattr(automatic_settings, "inspect_this_host", lambda: Host("here", cpus=8))
    assert chosen(settle(config, None, find_card=lambda: H200).config) == (4096, False, True)


def test_a_run_for_slurm_is_left_to_its_job_which_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = planned(*ONE_EACH, "cluster=slurm", "cluster.slurm.gpus_per_node=2", "run_dir=there")
    submitted = settle(config, plan, find_card=lambda: pytest.fail("looked at the login node"))
    assert submitted.config is config
    run = RunDirectory.create(tmp_path / "run")
    run.config_json.write_text(dump_run(config))
    run.config_yaml.write_text(as_yaml(config))
    write_identity(run, new_identity("one", datetime.now(UTC), config_hash(config)))
    assert len(find_open(load_run(run.config_json))) == 3
    monkeypatch.setattr(automatic_settings, "find_smallest_card", lambda: H200)
    settled = settle_in_job(run, config, plan)
    assert load_run(run.config_json) == settled.config
    assert chosen(settled.config) == (16_384, True, False)
    assert (
        read_identity(run).config_hash == config_hash(settled.config) == json.loads(run.config_json.read_text())["config_hash"]
    )
    assert f"# hash {config_hash(settled.config)}" in run.config_yaml.read_text()
    monkeypatch.setattr(automatic_settings, "find_smallest_card", lambda: pytest.fail("decided twice"))
    assert settle_in_job(run, load_run(run.config_json), plan).sentence == ""


def test_a_run_that_goes_on_keeps_its_values_on_another_card() -> None:
    config, plan = planned(*ONE_EACH)
    begun = settle(config, plan, find_card=lambda: H100).config
    assert chosen(begun) != (16_384, True, False)
    again = settle(config, plan, as_json(begun), lambda: H200)
    assert (again.config, again.sentence, again.misfit) == (begun, "", "")


def test_a_run_that_goes_on_where_it_does_not_fit_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what its directory keeps, or with nothing left to keep; in a Slurm job from its second attempt on."""
    config, plan = planned(*ONE_EACH)
    begun = settle(config, plan, find_card=lambda: H200).config
    told = [settle(config, plan, as_json(begun), lambda: H100), settle(begun, plan, {}, lambda: H100)]
    assert [found.config for found in told] == [begun, begun]
    assert "and has 79.6 of NVIDIA H100 80GB HBM3: if it runs out of memory, resume it with trainer.seq_len=" in told[0].misfit
    assert told[0].misfit == told[1].misfit
    assert settle(begun, plan, None, lambda: pytest.fail("looked")).misfit == ""  # what a user gives a new run is the user's
    monkeypatch.setattr(automatic_settings, "find_smallest_card", lambda: H100)
    run = RunDirectory.create(tmp_path / "run")
    attempts = [settle_in_job(run, begun, plan, goes_on=goes_on).misfit for goes_on in (False, True)]
    assert attempts == ["", told[0].misfit]


def test_check_says_what_was_chosen_and_the_hash_of_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, plan = planned(*ONE_EACH)
    monkeypatch.setattr(check, "make_plan_here", lambda config: (NodeIdentity(), plan))
    monkeypatch.setattr(check, "find_smallest_card", lambda: H200)
    monkeypatch.setattr(check, "find_absent", lambda *asked: [])
    monkeypatch.setattr(check, "find_obstacles", lambda *asked: [])
    assert check_main(list(ONE_EACH)) == 0
    said = capsys.readouterr().out
    assert f"valid, hash {config_hash(settle(config, plan, find_card=lambda: H200).config)}\n" in said
    assert "\n  Chosen for NVIDIA H200: trainer.seq_len=16384 (" in said


@pytest.mark.parametrize(
    ("typed", "checkpointing", "layers"),
    [
        ((), "full", 1),
        (("backend.gradient_checkpointing=false",), False, None),
        (("backend.gradient_checkpointing=auto",), False, None),
        (("backend.gradient_checkpointing=selective",), "selective", None),
        (("backend.checkpointed_layers=2", "backend.gradient_checkpointing=full"), "full", 2),
    ],
)
def test_another_way_of_checkpointing_does_not_keep_the_number_of_layers_of_the_one_before(
    typed: tuple[str, ...], checkpointing: object, layers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a number may have been chosen rather than given, and false would be refused with it."""
    begun = ("model=tiny", "inference.engine=fake", "backend.gradient_checkpointing=full", "backend.checkpointed_layers=1")
    config, plan = planned(*begun)
    run = RunDirectory.create(tmp_path / "run")
    run.config_json.write_text(dump_run(config.model_copy(update={"run_dir": str(run.path)})))
    write_identity(run, new_identity("one", datetime.now(UTC), config_hash(config)))
    monkeypatch.setattr(resume, "make_plan_here", lambda config: (NodeIdentity(), plan))
    monkeypatch.setattr(resume, "find_obstacles", lambda *asked: [])
    monkeypatch.setattr(automatic_settings, "_look_around", lambda *asked: GPU)
    started: list[RunOrder] = []

    def note(order: RunOrder) -> int:
        started.append(order)
        return 0

    monkeypatch.setattr(resume, "run_one", note)
    assert go_on(run.path, typed) == 0
    backend = started[0].config.backend
    assert (backend.checkpointing, getattr(backend, "checkpointed_layers", None)) == (checkpointing, layers)
