"""Sweeps: all points judged before one starts, whoever chooses them, and every result kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from telescope._launch.hosts.node_identity import NodeIdentity
from telescope._launch.own_command import name_own_command
from telescope.cli import run
from telescope.cli.run import _as_point, _leaves_saves_to_sweep
from telescope.cli.start import RunOrder
from telescope.cli.sweep import OBJECTIVE, Sweep, list_swept, name_point
from telescope.compose.load import Point, UsageError, load_points, places_for, version_base_for
from telescope.compose.sweeper import InvalidPoints, SweepStopped, has_sweeper, search
from telescope.runlog.layout import RunDirectory
from tests.config.conftest import write
from tests.config.test_command_line import telescope

__all__ = ["telescope"]
GRID = ("hydra/sweeper=basic", "algorithm=grpo,rloo", "seed=1,2")


SUMMARY = {"reward_policy_first": 0.25, "reward_policy_last": 0.5, "policy_last": {"versions": [3, 7], "rollouts": 1160}}


def ended(folder: Path, summary: dict[str, object] | None = None, verdict: str = "") -> Path:
    run = RunDirectory.create(folder)
    if summary is not None:
        run.summary_json.write_text(json.dumps(summary))
    if verdict:
        run.run_failure.write_text(verdict + "\n")
    return folder


def test_a_sweep_tells_every_point_and_all_failures_with_their_reasons(tmp_path: Path):
    sweep = Sweep(tmp_path / "s")
    sweep.ended(["seed=1"], ended(tmp_path / "s/000", SUMMARY), 0)
    sweep.ended(["seed=2"], ended(tmp_path / "s/001", verdict="server-0 was killed by SIGKILL."), 70)
    sweep.ended(["seed=3"], ended(tmp_path / "s/002", {"exit_reason": "the disk is full"}), 1)
    assert [(r.value, r.first, r.failed, r.reason) for r in sweep.results[1:]] == [
        (None, None, True, "server-0 was killed by SIGKILL."),
        (None, None, True, "the disk is full"),
    ]
    table = sweep.table()
    assert "    0     0                 0.5     1,160  seed=1" in table
    assert "    1    70                   -         -  seed=2" in table
    assert f"2 of 3 points failed:\n  1: server-0 was killed by SIGKILL. ({tmp_path / 's/001'})" in table
    told = json.loads((tmp_path / "s/sweep.json").read_text())
    assert [point["exit_code"] for point in told["points"]] == [0, 70, 1]
    assert told["points"][0]["first"] == 0.25


def test_points_that_are_equal_are_told_and_none_of_them_is_the_best(tmp_path: Path):
    sweep = Sweep(tmp_path / "s")
    for point, value in enumerate((0.81203, 0.4, 0.81204)):
        sweep.keep_best(
            sweep.ended([f"seed={point}"], ended(tmp_path / f"s/{point}", {**SUMMARY, "reward_policy_last": value}), 0)
        )
    assert "\n2 points are equal at 0.812: 0, 2. The weights of point 2 are kept (checkpoint.at_end" in sweep.table()
    assert "best" not in sweep.table()


def test_a_point_that_has_ended_is_one_line(tmp_path: Path):
    sweep = Sweep(tmp_path / "s")
    well = sweep.ended(["experiment=fake", "seed=1"], ended(tmp_path / "s/000", SUMMARY), 0, ["seed=1"])
    assert sweep.describe(well, 241.4) == "seed=1  reward 0.250 → 0.500 (n=1,160) in 4:01"
    badly = sweep.ended(["seed=2"], ended(tmp_path / "s/001", verdict="server-0 was killed."), 70, ["seed=2"])
    assert sweep.describe(badly, 12) == "seed=2  exit code 70 in 0:12: server-0 was killed."
    unscored = sweep.ended(["seed=3"], ended(tmp_path / "s/002", {"steps": 1}), 0, ["seed=3"])
    assert sweep.describe(unscored, 3).startswith("seed=3  exit code 0 in 0:03: it has no reward_policy_last")
    other = Sweep(tmp_path / "t", "seconds.training")
    timed = other.ended(["seed=1"], ended(tmp_path / "t/000", {"seconds": {"training": 90.5}}), 0, ["seed=1"])
    assert other.describe(timed, 100) == "seed=1  seconds.training 90.5 in 1:40"


def test_a_point_is_named_by_what_was_swept_safe_for_a_folder_and_a_job(tmp_path: Path):
    """Not by what all points have, be it chosen by the command line or by a sweeper."""
    given = ("experiment=fake", "model=tiny", "trainer.learning_rate=1e-4,2e-4", "+environments.x.kwargs.url='a/b c','d'")
    points = load_points(given, places_for(None), os.environ, sweep=True)
    swept = ("trainer.learning_rate=0.0002", "+environments.x.kwargs.url='a/b c'")
    assert points[2].swept == swept
    assert name_point(2, swept, "tiny-grpo") == "002_learning_rate-0.0002_url--a-b-c-"
    assert name_point(7, (), "tiny-grpo") == "007_tiny-grpo"
    assert name_point(1, ("x.note=sk-0123456789abcdefgh",), "") == "001_note--redacted-"
    assert name_point(1, ("x.kwargs.password=hunter2pass", "seed=1"), "") == "001_password_seed-1"
    for secret in ("cluster.env.PGPASSWORD=hunter2", "cluster.env={A: b, MYSQL_PWD: hunter2}", "x.kwargs.auth=hunter2"):
        assert "hunter2" not in name_point(1, (secret,), "")
    assert name_point(1, ("cluster.env.PGPASSWORD=hunter2",), "") == "001_PGPASSWORD"
    assert list_swept(("seed=1", "cluster.env.PGPASSWORD=hunter2")) == "seed=1 cluster.env.PGPASSWORD=…"
    assert name_point(1, ("model.name=hf:a/b",), "") == "001_name-hf-a-b"
    assert len(name_point(12, [f"trainer.setting_{n}={n}" for n in range(40)], "")) <= 80
    found: list[Point] = []
    search(GRID, places_for(None), os.environ, tmp_path, lambda points: [*map(found.append, points)] and [1.0] * 4)
    assert [point.swept for point in found][:2] == [("algorithm=grpo", "seed=1"), ("algorithm=grpo", "seed=2")]


def test_swept_numbers_are_numbers_however_small_and_a_setting_that_follows_another_is_no_axis():
    """Hydra once took 1e-9 for text in sweeps alone, and once crossed a reference with what it refers to."""
    small = load_points(("experiment=fake", "trainer.learning_rate=1e-4,1e-9,.00001"), places_for(None), os.environ, sweep=True)
    assert [point.config and point.config.trainer.learning_rate for point in small] == [1e-4, 1e-9, 1e-5]
    given = ("experiment=fake", "algorithm.clip_low=0.1,0.2", "algorithm.clip_high=${algorithm.clip_low}")
    follow = load_points(given, places_for(None), os.environ, sweep=True)
    settings = [point.composed["algorithm"] for point in follow]
    assert [(each["clip_low"], each["clip_high"]) for each in settings] == [(0.1, 0.1), (0.2, 0.2)]


@pytest.mark.filterwarnings("error")
def test_two_searches_in_one_process_warn_of_nothing(tmp_path: Path):
    """Hydra's store once kept our launcher, and newer versions of it say so when it comes again."""
    for _ in range(2):
        search(GRID, places_for(None), os.environ, tmp_path, lambda points: [1.0] * len(points))
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    assert "telescope.yaml" not in launchers


@pytest.mark.parametrize(("version", "told"), [("1.3.8", {"version_base": "1.3"}), ("1.4.0rc3", {}), ("2.0.0", {})])
def test_hydra_is_told_whose_defaults_to_take_only_where_it_wants_to_know(version: str, told: dict[str, str]):
    assert version_base_for(version) == told


def test_the_objective_is_any_number_of_the_summary(tmp_path: Path):
    sweep = Sweep(tmp_path, "seconds.training")
    assert sweep.ended([], ended(tmp_path / "0", {"seconds": {"training": 12}}), 0).value == 12.0
    none = sweep.ended([], ended(tmp_path / "1", {"seconds": 3}), 0)
    assert (none.value, none.failed) == (None, True)
    assert none.reason == "it has no seconds.training: --objective names a number of summary.json"


def test_a_point_without_one_scored_group_has_failed_with_a_sentence(tmp_path: Path):
    sweep = Sweep(tmp_path)
    none = sweep.ended(["seed=1"], ended(tmp_path / "0", {"reward_policy_last": None, "exit_reason": "all 3 steps"}), 0)
    assert (none.value, none.failed, none.reason) == (None, True, "it has no reward_policy_last: no group was scored")
    assert "1 of 1 points failed" in sweep.table()


def test_hydras_sweeper_gets_our_launcher_and_its_points_are_judged_as_a_batch(tmp_path: Path):
    batches: list[list[tuple[str, int]]] = []

    def launch(points: Sequence[Point]) -> list[float | None]:
        batches.append([(point.config.algorithm_name, point.config.seed) for point in points if point.config])
        return [1.0] * len(points)

    search(GRID, places_for(None), os.environ, tmp_path, launch)
    assert batches == [[("grpo", 1), ("grpo", 2), ("rloo", 1), ("rloo", 2)]]
    batches.clear()
    search([*GRID, "hydra.sweeper.max_batch_size=3"], places_for(None), os.environ, tmp_path, launch)
    assert [len(batch) for batch in batches] == [3, 1]
    assert "hydra_plugins.telescope" not in sys.modules


def test_a_batch_with_an_invalid_point_starts_none_of_it(tmp_path: Path):
    started: list[Point] = []

    def launch(points: Sequence[Point]) -> list[float | None]:
        started.extend(points)
        return [1.0] * len(points)

    with pytest.raises(InvalidPoints) as refused:
        search(
            ["hydra/sweeper=basic", "algorithm=grpo,gspo", "algorithm.use_tis=true"],
            places_for(None), os.environ, tmp_path, launch,
        )  # fmt: skip
    assert [bool(point.problems) for point in refused.value.points] == [False, True]
    assert started == []


def test_a_sweep_that_is_stopped_asks_for_no_more_points(tmp_path: Path):
    def launch(points: Sequence[Point]) -> list[float | None]:
        raise SweepStopped

    with pytest.raises(SweepStopped):
        search(GRID, places_for(None), os.environ, tmp_path, launch)


def test_of_hydras_settings_only_the_sweepers_are_taken(tmp_path: Path):
    with pytest.raises(UsageError, match=r"hydra.job.chdir=true: Hydra only composes here"):
        search([*GRID, "hydra.job.chdir=true"], places_for(None), os.environ, tmp_path, lambda points: [])
    with pytest.raises(UsageError, match="Could not find 'hydra/sweeper/nope'"):
        search(["hydra/sweeper=nope"], places_for(None), os.environ, tmp_path, lambda points: [])
    assert not has_sweeper(["algorithm=grpo,rloo"])


def test_a_searched_sweep_finds_the_presets_and_plug_ins_of_a_users_folder(user: Path, tmp_path: Path):
    write(user / "algorithm" / "steep.yaml", "defaults: [flat, _self_]\nslope: 0.9\n")
    slopes: list[float] = []

    def launch(points: Sequence[Point]) -> list[float | None]:
        slopes.extend(point.config.algorithm.slope for point in points if point.config)
        return [1.0] * len(points)

    grid = ("hydra/sweeper=basic", "algorithm=steep", "seed=1,2")
    search(grid, places_for(str(user)), os.environ, tmp_path, launch)
    assert slopes == [0.9, 0.9]


def test_points_that_were_not_trained_long_enough_to_be_compared_are_told(tmp_path):
    sweep = Sweep(tmp_path)
    for number, versions in enumerate(([0, 0], [1, 5])):
        run = RunDirectory(tmp_path / str(number))
        run.path.mkdir()
        run.summary_json.write_text(json.dumps({"reward_policy_last": 0.5, "policy_last": {"versions": versions}}))
        sweep.ended((f"seed={number}",), run.path, 0)
    assert "The reward of 1 of 2 points is that of version 0, before any update" in sweep.table()
    assert [point.version for point in Sweep.load(tmp_path).results] == [0, 5]


def test_of_points_that_have_ended_well_only_the_weights_of_the_best_are_kept(tmp_path: Path):
    sweep = Sweep(tmp_path / "a sweep")
    for number, (reward, code) in enumerate(((0.25, 0), (0.75, 75), (0.5, 0), (0.5, 0), (0.125, 0))):
        folder = ended(sweep.folder / str(number), {"reward_policy_last": reward})
        (RunDirectory(folder).checkpoints / "step_00000009").mkdir(parents=True)
        sweep.keep_best(sweep.ended((f"seed={number}",), folder, code))
    left = [number for number in range(5) if RunDirectory(sweep.folder / str(number)).checkpoints.exists()]
    assert left == [1, 2]  # from that of point 1, which was stopped, it can go on
    assert sweep.table().splitlines()[-2] == (
        "2 points are equal at 0.5: 2, 3. The weights of point 2 are kept (checkpoint.at_end=weights keeps all): "
        f"{name_own_command()} export latest --run-dir '{sweep.folder}/2' --to my-model"
    )


@pytest.mark.parametrize(
    ("given", "objective", "at_end", "kept_by_sweep"),
    [
        ((), OBJECTIVE, "auto", True),
        ((), "exact_last", "none", False),  # nobody has said that more is better
        (("cluster=slurm",), OBJECTIVE, "none", False),  # its points end in jobs of their own
        (("checkpoint.at_end=weights",), OBJECTIVE, "weights", False),
        (("checkpoint.every=5",), OBJECTIVE, "auto", False),
        (("checkpoint.dir=/saves",), OBJECTIVE, "auto", False),
        (("experiment=fake",), OBJECTIVE, "auto", False),  # which has nothing to save
    ],
)
def test_a_sweep_deletes_only_what_nobody_asked_for(
    tmp_path: Path, given: tuple[str, ...], objective: str, at_end: str, kept_by_sweep: bool
):
    (point,) = load_points(given, places_for(None), os.environ)
    assert point.config is not None
    config = point.config.model_copy(update=_as_point(point.config, Sweep(tmp_path, objective)))
    assert config.checkpoint.at_end == at_end
    assert _leaves_saves_to_sweep(config) is kept_by_sweep
    assert _as_point(point.config, None) == {}


def test_truth_values_of_a_sweep_stay_as_they_were_typed():
    given = ("experiment=fake", "debug=true,false", "environments.countdown.kwargs.word='True','a b'")
    points = load_points(given, places_for(None), os.environ, sweep=True)
    assert [point.swept[0] for point in points] == ["debug=true", "debug=true", "debug=false", "debug=false"]
    assert [point.swept[1].partition("=")[2] for point in points[:2]] == ["'True'", "'a b'"]


def test_the_command_line_refuses_a_searched_sweep_in_the_same_words(telescope, tmp_path):
    shown = telescope("-m", "hydra/sweeper=basic", "algorithm=grpo,gspo,sapo", "algorithm.use_tis=true")
    assert shown.returncode == 1
    assert shown.stderr.startswith("1 of 3 points are invalid; nothing was started.\n")
    assert telescope("--objective", "steps", "seed=1").returncode == 2


def test_a_sweep_never_overwrites_the_results_of_another(telescope, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sweep.json").write_text("{}")
    shown = telescope("-m", "experiment=fake", "seed=1,2", "run_dir=old")
    assert shown.returncode == 2
    assert "run_dir=old holds the results of a sweep already: name another" in shown.stderr
    assert (tmp_path / "old" / "sweep.json").read_text() == "{}"
    assert len(list((tmp_path / "old").iterdir())) == 1


def test_a_searched_sweep_on_slurm_is_refused(telescope, tmp_path):
    shown = telescope("-m", "hydra/sweeper=basic", "cluster=slurm", "cluster.dry_run=true", "seed=1,2")
    assert shown.returncode == 2
    assert "hydra/sweeper chooses points from results" in shown.stderr


@pytest.mark.parametrize(("rank", "points"), [(0, ("seed=0,1",)), (1, ("hydra/sweeper=basic", "seed=0,1"))])
def test_a_sweep_over_several_hosts_is_refused_on_each_before_anything_starts(telescope, tmp_path, rank, points):
    shared = ("cluster=bare_metal", "cluster.nodes=2", f"cluster.node_rank={rank}", f"run_dir={tmp_path}/sweep")
    shown = telescope("-m", "experiment=fake", *shared, *points)
    assert shown.returncode == 1
    assert "A sweep (-m) over 2 hosts is not possible" in shown.stderr
    assert "Nothing was started." in shown.stderr
    assert not list(tmp_path.rglob("run.json"))


def test_a_signal_ends_the_sweep_though_the_run_that_got_it_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in its last save: the code says that points are missing, and who chooses points asks for no more."""
    points = load_points(("experiment=fake", "seed=1,2"), places_for(None), os.environ, sweep=True)
    started = list[Path]()

    def run_one(order: RunOrder, *, kept_by_sweep: bool) -> int:
        started.append(ended(Path(str(order.config.run_dir)), {"reward_policy_last": 0.5}))
        RunDirectory(started[-1]).exit_json.write_text('{"exit_code": 0, "interrupted": 2}')
        return 0

    monkeypatch.setattr(run, "run_one", run_one)
    orders = [
        RunOrder(
            point.config.model_copy(update={"run_dir": str(tmp_path / str(number))}),
            None, NodeIdentity(), (), (), datetime.now().astimezone(),
        )
        for number, point in enumerate(points) if point.config is not None
    ]  # fmt: skip
    sweep = Sweep(tmp_path / "sweep")
    assert run._sweep_all(orders, points, sweep) == 130
    assert [result.exit_code for result in sweep.results] == [0]
    assert len(started) == 1
