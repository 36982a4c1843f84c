"""What may be said of checkpoints, and what does nothing."""

from __future__ import annotations

import pytest

from telescope.config.parts import CheckpointSettings
from tests.config.conftest import compose_one, sentences


@pytest.mark.parametrize(("every", "on"), [("false", False), ("0", False), ("1", True), ("25", True)])
def test_every_is_a_number_or_false(every, on):
    assert compose_one(f"checkpoint.every={every}").config.checkpoint.on is on


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


def test_a_folder_for_no_checkpoints_does_nothing():
    assert "checkpoint.dir=/data/x does nothing without checkpoints" in sentences(compose_one("checkpoint.dir=/data/x"))


def test_the_default_is_no_checkpoint():
    assert not CheckpointSettings().on


@pytest.mark.parametrize("place", ["", "/ckpt", "/blocks/../ckpt"])
def test_checkpoints_may_not_lie_where_the_next_attempt_puts_things_aside(tmp_path, place):
    given = ("checkpoint.every=10", f"run_dir={tmp_path}/run")
    said = sentences(compose_one(*given, f"checkpoint.dir={tmp_path}/run{place}"))
    assert f"lies in run_dir={tmp_path}/run, whose files are put aside when the run goes on" in said
    for fine in (f"{tmp_path}/run/checkpoints", f"{tmp_path}/elsewhere", f"{tmp_path}/run2"):
        assert compose_one(*given, f"checkpoint.dir={fine}").config.checkpoint.dir == fine
