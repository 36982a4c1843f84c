"""A head and other nodes, each a real supervisor with stand-ins for processes: deaths, silence, interrupts, strangers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from telescope._launch.hosts import head_rendezvous
from telescope._launch.hosts.node import is_heads_directory, make_own_directory
from telescope._launch.hosts.node_identity import NodeIdentity
from telescope._launch.hosts.node_protocol import AssignRun, HeadSocket, NodeOrders, NodeReport, NodeSocket
from telescope._launch.hosts.other_nodes import OtherNodes
from telescope._launch.process_plan import Host, LaunchPlan, ProcessPlan, make_plan, write_plan
from telescope._launch.stacks import read_stacks
from telescope.cli import plan as plan_command
from telescope.compose.load import load_points, places_for
from telescope.runlog.identity import RunIdentity, write_identity
from telescope.runlog.layout import RunDirectory, RunDirectoryInUse
from telescope.wire.supervisor_channel import RunUnderway
from tests.deadlines import refuse_late
from tests.process.conftest import stand_in, tell_supervisor

HEAD = """
import json, sys
from pathlib import Path
from telescope._launch.hosts.head_rendezvous import write_head_file
from telescope._launch.supervisor import supervise
from telescope._launch.supervisor import SupervisorTimeouts
from telescope._launch.process_plan import read_plan
from telescope._launch.hosts.other_nodes import NodesMissing, OtherNodes
from telescope._launch.hosts.node_protocol import HeadSocket
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.wire.security import make_keys

run, given = RunDirectory(Path(sys.argv[1])), json.loads(sys.argv[2])
plan = read_plan(run.plan_json)
socket = HeadSocket("tcp://127.0.0.1:*", bytes(32), range(1, given["nodes"]))
write_head_file(run, socket.endpoint, bytes(32))
nodes = OtherNodes(socket, given["nodes"], "hash", given["silent_s"], print)
try:
    nodes.gather(given["gather_s"])
except NodesMissing as error:
    nodes.end(70, str(error))
    sys.exit(str(error))
make_keys(run, plan.names)
ports = nodes.assign(run, lambda node, shared: {}, read_identity(run).run_id)
sys.exit(supervise(run, SupervisorTimeouts(**given["timeouts"]), nodes, ports[1]))
"""
LIMIT_S = 60.0
SILENT_S = 8.0
"""Long enough for a supervisor that waits for a processor, short enough to wait for."""


class Cluster:
    """A head and nodes on one host, in one run directory."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory.create(folder / "run")
        self.commands: list[subprocess.Popen[str]] = []
        self.seen: set[psutil.Process] = set()

    def start(self, *processes: tuple[int, ProcessPlan], nodes: int = 2, gather_s: float = LIMIT_S, restarts: int = 0) -> None:
        plans = [ProcessPlan(**{**{f: getattr(p, f) for f in p.__struct_fields__}, "node": node}) for node, p in processes]
        write_plan(LaunchPlan("cpu", tuple(plans), progress=False, max_server_restarts=restarts), self.run.plan_json)
        write_identity(self.run, RunIdentity(1, "run", "attempt", "test", "", "hash", ()))
        given = {"nodes": nodes, "silent_s": SILENT_S, "gather_s": gather_s, "timeouts": {"stop_s": 20.0, "grace_s": 20.0}}
        self.command("-c", HEAD, str(self.run.path), json.dumps(given))

    def join(self, node: int = 1, *more: str) -> subprocess.Popen[str]:
        folder = str(self.run.path)
        return self.command(
            "-m", "telescope._launch.hosts.node", "--run-dir", folder, "--node", str(node), "--interface", "127.0.0.2", *more
        )

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.commands.append(made)
        return made

    @property
    def head(self) -> subprocess.Popen[str]:
        return self.commands[0]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            refuse_late(deadline, [command.poll() for command in self.commands])
            time.sleep(0.02)

    def until_up(self, *names: str) -> None:
        self.until(lambda: all((self.run.path / "pids" / name).exists() for name in names))
        for command in self.commands:
            if command.poll() is None:
                self.seen |= set(psutil.Process(command.pid).children(recursive=True))

    def pid(self, name: str) -> int:
        return int((self.run.path / "pids" / name).read_text().split()[0])

    def ended(self, command: subprocess.Popen[str]) -> tuple[int, str]:
        out, err = command.communicate(timeout=LIMIT_S)
        return command.returncode, out + err

    def left(self) -> list[str]:
        _, alive = psutil.wait_procs(self.seen, timeout=LIMIT_S)
        return [str(process) for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for command in made.commands:
        if command.poll() is None:
            os.kill(command.pid, signal.SIGCONT)
            command.kill()
        command.communicate()
    for process in made.seen:
        if process.is_running():
            process.kill()


def forever(name: str, **environment: str) -> ProcessPlan:
    return stand_in(name, "obey", **environment)


def test_a_run_over_two_nodes_ends_on_both_with_its_exit_code(cluster: Cluster) -> None:
    cluster.start(*((node, stand_in(name, "finish")) for node, name in ((0, "orchestrator"), (1, "server-0"), (1, "worker-0"))))
    node = cluster.join()
    assert cluster.ended(cluster.head)[0] == 0
    assert cluster.ended(node)[0] == 0
    assert json.loads(cluster.run.exit_json.read_text())["processes"] == {"orchestrator": 0, "server-0": 0, "worker-0": 0}


def test_a_node_that_is_killed_ends_the_run_with_its_name_and_nothing_is_left(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")), (1, forever("worker-0")))
    node = cluster.join()
    cluster.until_up("orchestrator", "worker-0")
    os.kill(node.pid, signal.SIGKILL)
    code, said = cluster.ended(cluster.head)
    assert code == 70
    assert "The run failed: node-1 (" in said
    assert "it died, or its link was cut" in said
    assert cluster.run.run_failure.read_text().startswith("node-1 (")
    assert cluster.left() == []


@pytest.mark.slow
def test_a_node_that_hears_no_head_ends_what_it_has(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")), (1, forever("worker-0")))
    node = cluster.join()
    cluster.until_up("orchestrator", "worker-0")
    os.kill(cluster.head.pid, signal.SIGKILL)
    code, said = cluster.ended(node)
    assert code == 70
    assert f"the head was not heard for {SILENT_S:g} s: it died, or the link to it was cut" in said
    assert cluster.left() == []


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_sides(cluster: Cluster) -> None:
    """A supervisor that stands still says nothing and hears nothing, like one behind a cut link."""
    cluster.start((0, forever("orchestrator")), (1, forever("worker-0")))
    node = cluster.join()
    cluster.until_up("orchestrator", "worker-0")
    os.kill(node.pid, signal.SIGSTOP)
    code, said = cluster.ended(cluster.head)
    assert (code, "node-1" in said) == (70, True)
    os.kill(node.pid, signal.SIGCONT)
    assert cluster.ended(node)[0] == 70
    assert cluster.left() == []


def test_the_death_of_a_process_elsewhere_is_told_with_its_node(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")), (1, forever("trainer-0")))
    node = cluster.join()
    cluster.until_up("orchestrator", "trainer-0")
    os.kill(cluster.pid("trainer-0"), signal.SIGKILL)
    code, said = cluster.ended(cluster.head)
    assert code == 70
    assert "The run failed: on node-1 (" in said
    assert "trainer-0 was killed by signal 9 (SIGKILL)" in said
    assert cluster.ended(node)[0] == 70
    assert cluster.left() == []


def test_a_process_that_can_not_be_started_elsewhere_ends_the_run(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")), (1, forever("worker-0", TOKEN="${oc.env:TELESCOPE_TEST_NOT_SET}")))
    node = cluster.join()
    code, said = cluster.ended(cluster.head)
    assert code == 70
    assert "worker-0 could not be started: the environment variable TELESCOPE_TEST_NOT_SET is not set" in said
    assert cluster.ended(node)[0] == 70


def test_a_server_elsewhere_is_started_again(cluster: Cluster) -> None:
    cluster.start((0, stand_in("orchestrator", "relays")), (1, forever("server-0")), restarts=2)
    node = cluster.join()
    cluster.until_up("orchestrator", "server-0")
    tell_supervisor(cluster.run, RunUnderway())
    first = cluster.pid("server-0")
    os.kill(first, signal.SIGKILL)
    cluster.until(lambda: cluster.pid("server-0") != first)
    cluster.until_up("server-0")
    os.kill(cluster.head.pid, signal.SIGTERM)
    assert cluster.ended(cluster.head)[0] == 143
    assert cluster.ended(node)[0] == 143
    assert json.loads(cluster.run.exit_json.read_text())["restarts"] == {"server-0": 1}
    assert cluster.left() == []


SHARED_CARDS = (
    *("experiment=fake", "cluster=bare_metal", "cluster.device=gpu", "cluster.inference_num_workers=6"),
    *("inference.tensor_parallel_size=2", "inference.gpu_memory_utilization=0.45", "cluster.trainer_num_workers=3"),
    *("cluster.trainer_placement=SPREAD", "cluster.env_num_workers=3"),
)


@pytest.mark.slow
def test_what_plan_prints_is_what_processes_on_three_hosts_get(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts with 0, 4 and 4 GPUs; each stand-in writes down the variables that it has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # of the shell in which the run is started: not for its processes
    assert plan_command.main(["--placement", "--hosts", "1x0x16,2x4x64", *SHARED_CARDS]) == 0
    printed = re.findall(r"^  (\S+) +(?:GPU ([\d, ]+), )?(\d+) threads?$", capsys.readouterr().out, re.MULTILINE)
    (point,) = load_points(list(SHARED_CARDS), places_for(None), os.environ, sweep=False)
    assert point.config is not None
    plan = make_plan(point.config, (Host("host-0", 16), *(Host(f"host-{node}", 64, tuple("0123")) for node in (1, 2))))
    behaviour = {name: (*stand_in(name, "show_environment").program,) for name in plan.names}
    behaviour["orchestrator"] = stand_in("orchestrator", "finish").program
    cluster.start(
        *((process.node, msgspec.structs.replace(process, program=behaviour[process.name])) for process in plan.processes),
        nodes=3,
    )
    nodes = [cluster.join(node) for node in (1, 2)]
    assert [cluster.ended(command)[0] for command in (cluster.head, *nodes)] == [0, 0, 0]
    got = []
    for name in plan.names[1:]:
        text = (cluster.run.path / "environment" / name).read_text()
        seen = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        got.append((name, seen["CUDA_VISIBLE_DEVICES"].replace(",", ", "), seen["OMP_NUM_THREADS"]))
    assert sorted(got) == sorted(printed[1:])
    assert {name: gpus for name, gpus, _ in got}["trainer-2"] == "0"  # of the last host, with a server
    assert sorted(gpus for name, gpus, _ in got if name.startswith("server")) == ["0, 1", "0, 1", "2, 3"]


def test_an_interrupt_at_a_node_ends_the_run_everywhere(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")), (1, forever("worker-0")))
    node = cluster.join()
    cluster.until_up("orchestrator", "worker-0")
    os.kill(node.pid, signal.SIGINT)
    assert cluster.ended(cluster.head)[0] == 130
    assert cluster.ended(node)[0] == 130
    assert cluster.left() == []


def test_nodes_that_do_not_come_are_named(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")), nodes=3, gather_s=2.0)
    node = cluster.join(2)
    code, said = cluster.ended(cluster.head)
    assert code == 1
    assert "node-1 did not come within" in said or "node-1, node-2 did not come within" in said
    assert cluster.ended(node)[0] == 70


def test_a_node_with_other_settings_is_refused(cluster: Cluster) -> None:
    cluster.start((0, forever("orchestrator")))
    found = head_rendezvous.find_head(cluster.run, LIMIT_S)
    sock = NodeSocket(found.endpoint, found.key, 1)
    deadline = time.monotonic() + LIMIT_S
    while cluster.head.poll() is None and time.monotonic() < deadline:
        sock.send(NodeReport(1, "a", "other", _host()))
        time.sleep(0.05)
    sock.close()
    assert "node-1 (here) was started with other settings (hash other, here hash)" in cluster.ended(cluster.head)[1]


def test_a_host_that_does_not_see_the_run_directory_takes_part_in_a_second_attempt_with_new_files(tmp_path: Path) -> None:
    """Its own directory has the run's id since the first one; with that one's keys and plan its processes would meet nobody."""
    heads = [RunIdentity(1, "run", attempt, "test", "", "hash", ()) for attempt in ("first", "second")]
    told = [AssignRun("run", "/head", SILENT_S, {"run.json": msgspec.json.encode(head).decode()}) for head in heads]
    own = RunDirectory(tmp_path / "runs" / "mine_node-1")
    assert not is_heads_directory(own, told[0])
    make_own_directory(own, "run")
    write_identity(own, heads[0])
    own.log("trainer-1").write_text("of the first")
    assert is_heads_directory(own, told[0])
    assert not is_heads_directory(own, told[1])
    make_own_directory(own, "run")
    assert not own.log("trainer-1").exists()
    assert RunDirectory(own.earlier_attempt(1)).log("trainer-1").read_text() == "of the first"
    with pytest.raises(RunDirectoryInUse):
        make_own_directory(own, "another")


@pytest.fixture
def sock() -> Iterator[HeadSocket]:
    made = HeadSocket("tcp://127.0.0.1:*", bytes(32), (1,))
    yield made
    made.close()


def joined_by(cluster: Cluster, sock: HeadSocket, run_id: str, said: list[str]) -> tuple[OtherNodes, subprocess.Popen[str]]:
    """A head of a run of its own on `sock`, and a node that has taken part."""
    run = RunDirectory.create(cluster.run.path.parent / run_id)
    write_identity(run, RunIdentity(1, run_id, "attempt", "test", "", "hash", ()))
    head_rendezvous.write_head_file(run, sock.endpoint, bytes(32))
    nodes = OtherNodes(sock, 2, "hash", LIMIT_S, said.append)
    node = cluster.command("-m", "telescope._launch.hosts.node", "--run-dir", str(run.path), "--node", "1")
    nodes.gather(LIMIT_S)
    nodes.assign(run, lambda *_: {}, run_id)
    return nodes, node


NODE = """
import sys
from pathlib import Path
from telescope._launch.hosts.node import NodeOptions, run_node
from telescope._launch.hosts.node_identity import NodeIdentity

identity = NodeIdentity(2, 1, ("127.0.0.1", int(sys.argv[1])), bytes(32))
sys.exit(run_node(NodeOptions(identity, "hash", Path(sys.argv[2]), "127.0.0.1", 60.0), print))
"""
HANGS = """
import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR1)
print("with", os.environ["MY_TOKEN"], flush=True)
def reward():
    time.sleep(600)
reward()
"""


def test_the_stacks_of_a_process_come_to_a_head_that_does_not_see_its_log(
    cluster: Cluster, sock: HeadSocket, tmp_path: Path
) -> None:
    """Redacted, as the log is from which they come; the head asks, and waits for nothing."""
    script, run, own = tmp_path / "hard.py", RunDirectory.create(tmp_path / "head"), RunDirectory(tmp_path / "own")
    script.write_text(HANGS)
    write_identity(run, RunIdentity(1, "run", "attempt", "test", "", "hash", ()))
    nodes = OtherNodes(sock, 2, "hash", LIMIT_S, print)
    cluster.command("-c", NODE, sock.endpoint.rpartition(":")[2], str(own.path))
    nodes.gather(LIMIT_S)
    nodes.assign(run, lambda *_: {}, "run")
    secret = {"MY_TOKEN": "correct-horse-battery"}
    worker = nodes.begin(ProcessPlan("worker-0", "worker", 0, "here", (str(script),), secret, (), 1, node=1), {}, 1)

    def seen(log: Path, words: str) -> bool:
        nodes.pump()
        return log.exists() and words in log.read_text()

    cluster.until(lambda: seen(own.log("worker-0"), "with <redacted>"))
    assert not run.log("worker-0").exists()
    worker.ask_stack()
    cluster.until(lambda: seen(run.log("worker-0"), "in reward"))
    text = run.log("worker-0").read_text()
    found = read_stacks(text)
    assert found is not None
    assert (found.place.file, found.place.function) == (str(script), "reward")
    assert "with <redacted>" in text
    nodes.end(0, "over")


@pytest.mark.slow
def test_a_node_of_an_earlier_run_with_the_same_key_is_not_taken_into_the_next(cluster: Cluster, sock: HeadSocket) -> None:
    """Its head is gone, and the next one listens at the same address before the node has noticed."""
    said: list[str] = []
    _, old = joined_by(cluster, sock, "first", said)
    nodes, fresh = joined_by(cluster, sock, "second", said)

    def refused() -> bool:
        nodes.pump()
        return any("is not answered: it still belongs to an earlier run with this key" in line for line in said)

    cluster.until(refused)
    assert [line.endswith("has come.") for line in said].count(True) == 2
    nodes.end(0, "")
    assert cluster.ended(fresh)[0] == 0
    assert old.poll() is None  # or this shows nothing


def test_a_node_that_has_obeyed_nobody_yet_follows_the_next_head(sock: HeadSocket) -> None:
    said: list[str] = []
    nodes, node = OtherNodes(sock, 2, "hash", LIMIT_S, said.append), NodeSocket(sock.endpoint, bytes(32), 1)
    deadline = time.monotonic() + LIMIT_S
    orders: list[NodeOrders] = []
    while not orders and time.monotonic() < deadline:
        node.send(NodeReport(1, "a", "", _host(), head="one that is gone"))
        nodes.pump()
        time.sleep(0.02)
        orders = node.receive()
    assert (orders[0].first, orders[0].orders) == (1, ())
    assert said == ["node-1 (here) has come."]
    node.close()


def test_a_second_command_with_the_same_number_is_told_of_and_gets_no_orders(sock: HeadSocket) -> None:
    said: list[str] = []
    nodes = OtherNodes(sock, 2, "hash", LIMIT_S, said.append)
    first, second = (NodeSocket(sock.endpoint, bytes(32), 1) for _ in range(2))
    got: dict[str, list[NodeOrders]] = {"first": [], "second": []}
    deadline = time.monotonic() + LIMIT_S
    while len(got["first"]) < 2 and time.monotonic() < deadline:
        first.send(NodeReport(1, "a", "", _host()))
        if said:
            second.send(NodeReport(1, "b", "", _host()))
        if len(said) < 2:
            got["first"].clear()  # two after the second one was heard
        nodes.pump()
        time.sleep(0.02)
        got["first"] += first.receive()
        got["second"] += second.receive()
    assert len(got["first"]) >= 2
    assert got["second"] == []
    assert said[1:] == [
        "node-1 (here) is not answered: it is a second command with cluster.node_rank=1; the first one is in the run."
    ]
    first.close()
    second.close()


def _host() -> Host:
    return Host("here", 1)


def heard(head: HeadSocket, *sockets: tuple[NodeSocket, NodeReport]) -> list[int]:
    """Nodes that the head hears within a second after it has heard one, or within the limit if it hears none."""
    found: list[int] = []
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for sock, report in sockets:
            sock.send(report)
        for report, _ in head.receive():
            if not found:
                end = min(end, time.monotonic() + 1.0)
            found.append(report.node)
        time.sleep(0.02)
    return sorted(set(found))


def test_only_nodes_with_the_key_are_heard_and_each_only_as_itself() -> None:
    key, other = bytes(32), bytes([1] * 32)
    head = HeadSocket("tcp://127.0.0.1:*", key, (1, 2))
    honest, stranger, liar = (NodeSocket(head.endpoint, k, rank) for k, rank in ((key, 1), (other, 2), (key, 1)))
    third = NodeSocket(head.endpoint, key, 3)  # the key is right, but the run has no such node
    host = _host()
    sockets = [
        (stranger, NodeReport(2, "b", "", host)),
        (liar, NodeReport(2, "c", "", host)),
        (third, NodeReport(3, "d", "", host)),
        (honest, NodeReport(1, "a", "", host)),
    ]
    assert heard(head, *sockets) == [1]
    for sock in (honest, stranger, liar, third, head):
        sock.close()


def test_a_node_does_not_go_to_where_the_head_of_an_earlier_attempt_was(tmp_path: Path) -> None:
    """It came before the head of its own attempt had put that address aside."""
    run = RunDirectory.create(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        head_rendezvous.write_head_file(run, f"tcp://127.0.0.1:{gone.getsockname()[1]}", bytes(32))
    with pytest.raises(TimeoutError, match="did node 0 start"):
        head_rendezvous.find_head(run, 0.3)


def test_the_key_of_a_run_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as head:
        head_rendezvous.write_head_file(run, f"tcp://127.0.0.1:{head.getsockname()[1]}", bytes(32))
        assert head_rendezvous.find_head(run, LIMIT_S).address == "127.0.0.1"
    assert run.nodes_json.stat().st_mode & 0o777 == 0o600
    assert run.nodes_json.parent.stat().st_mode & 0o777 == 0o700
    assert "00000" not in repr(NodeIdentity(2, 1, None, bytes(32)))
