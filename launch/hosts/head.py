"""The head of a run on several hosts, until processes start: the other nodes come, the plan is made, all are told.

From then on it is `supervisor.supervise`. Owns the order of these steps and what each node is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from telescope._launch.hosts import head_rendezvous
from telescope._launch.hosts.address import NoAddress, find_head_address, find_interface, find_local_address, format_endpoint
from telescope._launch.hosts.node_identity import KEY_BYTES, NodeIdentity, end_with_parent
from telescope._launch.hosts.node_protocol import HeadSocket
from telescope._launch.hosts.other_nodes import NodesMissing, OtherNodes
from telescope._launch.preflight import refuse
from telescope._launch.process_plan import Host, LaunchPlan, PlanError, describe_shared_gpus, make_plan, write_plan
from telescope._launch.supervisor import supervise
from telescope._launch.this_host import inspect_this_host
from telescope.config.run import RunConfig, config_hash
from telescope.exit_codes import COMPONENT_FAILED, ERROR
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.base import TransportRefused
from telescope.weights.transport_choice import choose, placement_of
from telescope.wire.security import make_keys

SILENT_SHARE = 0.8
"""A node is lost before its processes are: then the reason names the node."""


def run_head(run: RunDirectory, config: RunConfig, identity: NodeIdentity, say: Callable[[str], None]) -> int:
    """Run on all nodes, in the foreground, from the main thread. Gives the exit code."""
    if identity.under_torchrun:
        end_with_parent()
    try:
        host, socket = _open(run, config, identity)
    except (NoAddress, zmq.ZMQError) as error:
        say(f"{error if isinstance(error, NoAddress) else _describe_bind_error(identity, error)}\nNothing was started.")
        return ERROR
    silent_s = SILENT_SHARE * config.orchestrator.silent_s
    nodes = OtherNodes(socket, identity.nodes, config_hash(config), silent_s, say)
    say(f"Waiting for {identity.nodes - 1} other node{'s' * (identity.nodes > 2)} at {socket.endpoint}.")
    try:
        hosts = (host, *nodes.gather(config.cluster.placement_timeout_s))
        plan = make_plan(config, hosts)
        refuse(config, plan, elsewhere=True)
        if shared := describe_shared_gpus(plan):
            say(f"Warning: {shared}")
        ports = _send_plan(run, config, nodes, plan, keyed=identity.key is not None)
    except (PlanError, NodesMissing) as error:
        code = COMPONENT_FAILED if isinstance(error, NodesMissing) else ERROR
        nodes.end(code, str(error))
        say(f"{error}\nNothing was started.")
        return code
    first = next((process.node for process in plan.processes if process.role == "trainer"), None)
    return supervise(run, nodes=nodes, port=0 if first is None else ports.get(first, 0))


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
