"""The head of a run on several hosts, until processes start: the other nodes come, the plan is made, all are told.

From then on it is `supervisor.supervise`. Owns the order of these steps and what each node is sent; refuses to say what becomes
of the run directory where it does not come so far.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from telescope._launch.held_signals import HeldSignals, raise_on_signals
from telescope._launch.hosts import head_rendezvous
from telescope._launch.hosts.address import NoAddress, find_head_address, find_interface, find_local_address, format_endpoint
from telescope._launch.hosts.node_identity import KEY_BYTES, NodeIdentity, end_with_parent
from telescope._launch.hosts.node_protocol import HeadSocket
from telescope._launch.hosts.other_nodes import NodesMissing, OtherNodes
from telescope._launch.preflight import refuse
from telescope._launch.process_plan import Host, LaunchPlan, PlanError, describe_shared_gpus, make_plan, write_plan
from telescope._launch.this_host import inspect_this_host
from telescope.config.run import RunConfig
from telescope.exit_codes import COMPONENT_FAILED, ERROR
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.base import TransportRefused
from telescope.weights.transport_choice import choose, placement_of
from telescope.wire.process import Interrupted
from telescope.wire.security import make_keys

SILENT_SHARE = 0.8
"""A node is lost before its processes are: then the reason names the node."""


class NothingStarted(RuntimeError):
    """The nodes can't be a run, or did not come to be one; all that came have been let go. The text says why."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def gather_nodes(
    run: RunDirectory, config: RunConfig, identity: NodeIdentity, say: Callable[[str], None], held: HeldSignals,
    given_hash: str,
) -> tuple[OtherNodes, int]:  # fmt: skip
    """The other nodes, ready for `supervise`, and the port that is kept where the trainer's rank 0 will be (0: none is). A
    signal ends the wait for them, also one that is `held` already. `given_hash`: of the settings as the command line has them
    on each host, with `auto` undecided. Raises `NothingStarted`."""
    if identity.under_torchrun:
        end_with_parent()
    try:
        host, socket = _open(run, config, identity)
    except (NoAddress, zmq.ZMQError) as error:
        sentence = str(error) if isinstance(error, NoAddress) else _describe_bind_error(identity, error)
        raise NothingStarted(ERROR, sentence) from error
    silent_s = SILENT_SHARE * config.orchestrator.silent_s
    nodes = OtherNodes(socket, identity.nodes, given_hash, silent_s, say)
    say(f"Waiting for {identity.nodes - 1} other node{'s' * (identity.nodes > 2)} at {socket.endpoint}.")
    try:
        with raise_on_signals():
            if held.number is not None:
                raise Interrupted(held.number)
            hosts = (host, *nodes.gather(config.cluster.placement_timeout_s))
            plan = make_plan(config, hosts)
            refuse(config, plan, elsewhere=True)
            if shared := describe_shared_gpus(plan):
                say(f"Warning: {shared}")
            ports = _send_plan(run, config, nodes, plan, keyed=identity.key is not None)
    except (PlanError, NodesMissing, Interrupted) as error:
        ended = 128 + error.number if isinstance(error, Interrupted) else COMPONENT_FAILED
        code = ERROR if isinstance(error, PlanError) else ended
        nodes.end(code, str(error))
        raise NothingStarted(code, str(error)) from error
    first = next((process.node for process in plan.processes if process.role == "trainer"), None)
    return nodes, 0 if first is None else ports.get(first, 0)


def _open(run: RunDirectory, config: RunConfig, identity: NodeIdentity) -> tuple[Host, HeadSocket]:
    """This host, and the socket to which the others come."""
    interface = config.cluster.interface
    known_as, port = identity.head or (None, 0)
    address = find_local_address(interface) if known_as is None else find_head_address(known_as, interface)
    key = identity.key or secrets.token_bytes(KEY_BYTES)
    at = format_endpoint(address, port) if port else format_endpoint(address, 0).removesuffix("0") + "*"
    socket = HeadSocket(at, key, range(1, identity.nodes))
    if identity.key is None:
        head_rendezvous.write_head_file(run, socket.endpoint, key)
    return msgspec.structs.replace(inspect_this_host(), address=address, interface=find_interface(address)), socket


def _describe_bind_error(identity: NodeIdentity, error: zmq.ZMQError) -> str:
    at = ":".join(map(str, identity.head or ()))
    return (
        f"the head can't listen at {at} ({error.strerror}): set cluster.head to a free port of this host, the same on all hosts"
    )


def _send_plan(run: RunDirectory, config: RunConfig, nodes: OtherNodes, plan: LaunchPlan, keyed: bool) -> dict[int, int]:
    """Write the plan and the keys, and give each node what it needs. Its answer is the port that it keeps."""
    write_plan(plan, run.plan_json)
    make_keys(run, plan.names)
    identity = read_identity(run)

    def files(node: int, shared: bool) -> dict[str, str]:
        if shared:
            return {}
        own = [process.name for process in plan.processes if process.node == node]
        paths = [run.config_json, run.run_json, run.plan_json]
        paths += [run.resume_json] if run.resume_json.exists() else []
        paths += [run.public_key(name) for name in plan.names] + [run.secret_key(name) for name in own]
        paths += [run.http_key] if run.http_key.exists() else []
        return {str(path.relative_to(run.path)): path.read_text(encoding="utf-8") for path in paths}

    ports = nodes.assign(run, files, identity.run_id)
    try:
        choose(config, replace(placement_of(plan), run_dir_on_all=nodes.shared))
    except TransportRefused as error:
        raise PlanError(str(error)) from error
    return ports
