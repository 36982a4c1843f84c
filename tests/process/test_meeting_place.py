"""What trainer ranks are told of the place where they meet."""

from __future__ import annotations

import stat
from pathlib import Path

from telescope._launch.meeting_place import open_meeting_place
from telescope._launch.process_plan import MEETING_FILE, Host, LaunchPlan


def plan_of(*names: str) -> LaunchPlan:
    return LaunchPlan("cpu", (), hosts=tuple(Host(name, cpus=2) for name in names))


def test_on_one_host_it_is_a_file_in_a_folder_of_the_user_alone_that_goes_with_the_run():
    with open_meeting_place(plan_of("one")) as told:
        assert list(told) == [MEETING_FILE]
        folder = Path(told[MEETING_FILE]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_between_hosts_it_is_a_port_of_the_head_or_the_one_that_was_kept_elsewhere():
    with open_meeting_place(plan_of("one", "two")) as told:
        assert int(told["MASTER_PORT"]) > 0
    with open_meeting_place(plan_of("one", "two"), port=29401) as told:
        assert told == {"MASTER_PORT": "29401"}
