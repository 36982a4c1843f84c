"""The head of a run on several hosts, until processes start: the other nodes come, the plan is made, all are told.

From then on it is `node.supervise`. Owns the order of these steps and what each node is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from telescope._launch import meet
from telescope._launch.address import NoAddress, endpoint, interface_of, local_address, own_address
from telescope._launch.local import this_host
from telescope._launch.node import supervise
from telescope._launch.obstacles import refuse
from telescope._launch.plan import Host, Plan, PlanError, make_plan, shared_gpus, write_plan
from telescope._launch.remote import Nodes, NodesMissing
from telescope._launch.standing import KEY_BYTES, Standing, end_with_parent
from telescope._launch.talk import HeadTalk
from telescope.config.run import RunConfig, config_hash
from telescope.exit_codes import COMPONENT_FAILED, ERROR
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.base import TransportRefused
from telescope.weights.choose import choose, placement_of
from telescope.wire.security import make_keys

SILENT_SHARE = 0.8
"""A node is lost before its processes are: then the reason names the node."""


def lead(run: RunDirectory, config: RunConfig, standing: Standing, say: Callable[[str], None]) -> int:
    """Run on all nodes, in the foreground, from the main thread. Gives the exit code."""
    if standing.under_torchrun:
        end_with_parent()
    try:
        host, talk = _open(run, config, standing)
    except (NoAddress, zmq.ZMQError) as error:
        say(f"{error if isinstance(error, NoAddress) else _unbound(standing, error)}\nNothing was started.")
        return ERROR
    silent_s = SILENT_SHARE * config.orchestrator.silent_s
    nodes = Nodes(talk, standing.nodes, config_hash(config), silent_s, say)
    say(f"Waiting for {standing.nodes - 1} other node{'s' * (standing.nodes > 2)} at {talk.endpoint}.")
    try:
        hosts = (host, *nodes.gather(config.cluster.placement_timeout_s))
        plan = make_plan(config, hosts)
        refuse(config, plan, elsewhere=True)
        if shared := shared_gpus(plan):
            say(f"Warning: {shared}")
        ports = _tell(run, config, nodes, plan, keyed=standing.key is not None)
    except (PlanError, NodesMissing) as error:
        code = COMPONENT_FAILED if isinstance(error, NodesMissing) else ERROR
        nodes.end(code, str(error))
        say(f"{error}\nNothing was started.")
        return code
    first = next(process for process in plan.processes if process.role == "trainer")
    return supervise(run, nodes=nodes, port=ports.get(first.node, 0))


def _open(run: RunDirectory, config: RunConfig, standing: Standing) -> tuple[Host, HeadTalk]:
    """This host, and the socket to which the others come."""
    interface = config.cluster.interface
    known_as, port = standing.head or (None, 0)
    address = local_address(interface) if known_as is None else own_address(known_as, interface)
    key = standing.key or secrets.token_bytes(KEY_BYTES)
    at = endpoint(address, port) if port else endpoint(address, 0).removesuffix("0") + "*"
    talk = HeadTalk(at, key, range(1, standing.nodes))
    if standing.key is None:
        meet.publish(run, talk.endpoint, key)
    return msgspec.structs.replace(this_host(), address=address, interface=interface_of(address)), talk


def _unbound(standing: Standing, error: zmq.ZMQError) -> str:
    at = ":".join(map(str, standing.head or ()))
    return (
        f"the head can't listen at {at} ({error.strerror}): set cluster.head to a free port of this host, the same on all hosts"
    )


def _tell(run: RunDirectory, config: RunConfig, nodes: Nodes, plan: Plan, keyed: bool) -> dict[int, int]:
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
