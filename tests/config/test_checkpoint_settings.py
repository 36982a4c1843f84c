"""What may be said of checkpoints, and what does nothing."""

from __future__ import annotations

import pytest

from telescope.config.slurm import SlurmSettings
from tests.config.conftest import compose_one, sentences


@pytest.mark.parametrize(("every", "steps"), [("false", 0), ("0", 0), ("1", 1), ("25", 25)])
def test_every_is_a_number_or_false(every, steps):
    found = compose_one(f"checkpoint.every={every}").config.checkpoint.every
    assert (found, type(found)) == (steps, int)


@pytest.mark.parametrize(("resume", "value"), [("false", False), ("true", True), ("40", 40)])
def test_resume_is_a_step_or_true(resume, value, tmp_path):
    found = compose_one(f"checkpoint.resume={resume}", f"run_dir={tmp_path}").config.checkpoint.resume
    assert (found, type(found)) == (value, type(value))


def test_every_true_is_refused_as_no_number():
    assert sentences(compose_one("checkpoint.every=true")) == "checkpoint.every=true must be a whole number"


def test_keep_every_alone_keeps_nothing_that_is_not_kept_anyway():
    assert sentences(compose_one("checkpoint.every=10", "checkpoint.keep_every=50")) == (
        "checkpoint.keep_every=50 does nothing where checkpoint.keep_last is not set, as all are kept then: set "
        "checkpoint.keep_last=2, say, or leave it out"
    )


@pytest.mark.parametrize("given", ["checkpoint.dir=/data/x", "checkpoint.keep_last=1"])
def test_what_becomes_of_checkpoints_does_nothing_where_there_are_none(given):
    assert f"{given} does nothing without checkpoint.every" in sentences(compose_one(given, "checkpoint.at_end=none"))
    assert compose_one(given).problems == ()


@pytest.mark.parametrize("place", ["", "/ckpt", "/blocks/../ckpt"])
def test_checkpoints_may_not_lie_where_the_next_attempt_puts_things_aside(tmp_path, place):
    given = ("checkpoint.every=10", f"run_dir={tmp_path}/run")
    said = sentences(compose_one(*given, f"checkpoint.dir={tmp_path}/run{place}"))
    assert f"lies in run_dir={tmp_path}/run, whose files are put aside when the run goes on" in said
    for fine in (f"{tmp_path}/run/checkpoints", f"{tmp_path}/elsewhere", f"{tmp_path}/run2"):
        assert compose_one(*given, f"checkpoint.dir={fine}").config.checkpoint.dir == fine


def test_what_a_stop_takes_must_fit_before_slurms_walltime():
    slurm = ("cluster=slurm", "checkpoint.every=10")
    assert compose_one(*slurm).problems == ()  # 120 s of 180
    assert sentences(compose_one(*slurm, "cluster.slurm.stop_before_s=120")) == (
        "checkpoint.stop_timeout_s=120 does not fit before the walltime: of cluster.slurm.stop_before_s=120 a step and its "
        "save get 90 s; set cluster.slurm.stop_before_s=150, or checkpoint.stop_timeout_s=90"
    )
    for remedy in ("cluster.slurm.stop_before_s=150", "checkpoint.stop_timeout_s=90"):
        assert compose_one(*slurm, "cluster.slurm.stop_before_s=120", remedy).problems == ()
    short = compose_one("cluster=slurm", "cluster.slurm.stop_before_s=30")  # the save at a stop has what there is
    assert short.problems == ()
    assert short.config.stop_timeout_s == short.config.cluster.slurm.save_s == 7.5
    assert compose_one("cluster=slurm").config.stop_timeout_s == 120


@pytest.mark.parametrize("save_s", [0.1, 2.5, 9.0, 10.0, 11.0, 29.5, 30.0, 31.0, 120.0, 3600.0])
def test_the_remedy_for_slurms_warning_is_enough(save_s):
    assert SlurmSettings(stop_before_s=SlurmSettings.before_for(save_s)).save_s >= save_s
