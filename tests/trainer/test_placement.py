"""Where a rank stands, from the launcher's variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.backends.base import World
from telescope.config.sections import ClusterSettings
from telescope.trainer.main import Misplaced, job, placement
from tests.config.conftest import compose_one


def test_a_lone_rank_on_a_cpu_needs_no_variables():
    assert placement({}, ClusterSettings(trainer_num_workers=1)) == World(0, 1, "cpu")


def test_each_rank_uses_the_one_gpu_it_is_shown():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "7"}
    assert placement(environ, ClusterSettings(trainer_num_workers=4)) == World(3, 4, "cuda:0")


def test_ranks_that_are_shown_all_gpus_take_their_own():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert placement(environ, ClusterSettings(trainer_num_workers=8)) == World(5, 8, "cuda:1")


def test_ranks_of_one_host_meet_by_the_file_that_they_are_told():
    world = placement({"TELESCOPE_MEETING_FILE": "/tmp/x/ranks"}, ClusterSettings(trainer_num_workers=1))
    assert world.meeting_file == Path("/tmp/x/ranks")
    assert placement({}, ClusterSettings(trainer_num_workers=1)).meeting_file is None


def test_a_cpu_run_ignores_gpus():
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    assert placement(environ, ClusterSettings(trainer_num_workers=1, device="cpu")).device == "cpu"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is None"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "rank 0 of 3"),
        ({"RANK": "0", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}, "shows this trainer rank no GPU"),
    ],
)
def test_variables_that_do_not_fit_are_refused(environ, sentence):
    with pytest.raises(Misplaced, match=sentence):
        placement(environ, ClusterSettings(trainer_num_workers=2, device="gpu"))


def test_the_backend_is_told_the_longest_sample_of_the_run():
    """A row of 2,048 tokens holds eight of the embedded model's longest samples."""
    config = compose_one("model=tiny").config
    assert config is not None
    told = job(config, World(rank=0, size=1, device="cpu"), lambda doing: None)
    assert (told.trainer.seq_len, told.max_model_len, told.longest) == (2048, 256, 256)
    cut = compose_one("model=tiny", "trainer.seq_len=128", "trainer.overlong=truncate").config
    assert cut is not None
    assert job(cut, World(rank=0, size=1, device="cpu"), lambda doing: None).longest == 128
