"""A worker of its own: `python -m tests.wire.peer_process RUN_DIR NAME`. Answers each order at once; ends with the link's
last sentence on stderr and exit code 0 after Stop, 70 otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from telescope.records import RolloutOrder
from telescope.runlog.layout import RunDirectory
from telescope.wire.link import Link, LinkLost
from telescope.wire.messages import RolloutResult, RunRollout, Stop
from tests.wire.samples import hello, trajectory


def result(order: RolloutOrder) -> RolloutResult:
    return RolloutResult(order.rollout_id, order.attempt, 1.0, {}, (6,), 3, 3, 1, "stop", 1.0, "", "", (), 1, 2, 3)


def main() -> int:
    run, name = RunDirectory(Path(sys.argv[1])), sys.argv[2]
    link = Link.connect(run, hello(name, pid=os.getpid(), incarnation=os.urandom(8).hex(), capacity=64), 20.0)
    try:
        while True:
            delivery = link.receive(60.0)
            if delivery is None or isinstance(delivery.body, Stop):
                link.close()
                return 0
            assert isinstance(delivery.body, RunRollout)
            link.progress(f"rollout {delivery.body.order.rollout_id}")
            link.send(result(delivery.body.order), trajectory(6), answers=delivery)
    except LinkLost as lost:
        print(lost, file=sys.stderr)
        return 70


if __name__ == "__main__":
    sys.exit(main())
