"""Which host of a run this is, the key that hosts share, and addresses: from settings and torchrun's variables."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from telescope._launch.hosts.address import (
    KeptPort,
    NoAddress,
    find_head_address,
    find_interface,
    find_local_address,
    format_endpoint,
    is_own_address,
)
from telescope._launch.hosts.node_identity import BadKeyFile, identify_node, read_key, write_key
from telescope._launch.hosts.node_protocol import derive_keys
from telescope._launch.process_plan import PlanError
from telescope.config.cluster import ClusterSettings, split_address

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def metal(**settings: object) -> ClusterSettings:
    return ClusterSettings(launcher="bare_metal", **settings)


@pytest.fixture
def key(tmp_path: Path) -> str:
    write_key(tmp_path / "key")
    return str(tmp_path / "key")


def test_torchrun_says_who_this_is_and_where_the_head_is(key: str) -> None:
    found = identify_node(metal(), "/shared/run", TORCHRUN)
    assert (found.nodes, found.rank, found.head, found.key) == (3, 2, ("10.0.0.1", 0), None)
    found = identify_node(metal(key_file=key), None, TORCHRUN)
    assert (found.head, found.key) == (("10.0.0.1", 29501), read_key(Path(key)))
    assert "29501" not in repr(found)


def test_the_plain_command_says_it_by_settings(key: str) -> None:
    found = identify_node(metal(nodes=2, node_rank=1, head="[fd00::1]:4000", key_file=key), None, {})
    assert (found.nodes, found.rank, found.head) == (2, 1, ("fd00::1", 4000))
    assert identify_node(metal(), None, {}).nodes == 1
    assert identify_node(ClusterSettings(), None, {"RANK": "1", "WORLD_SIZE": "2"}).nodes == 1  # not torchrun's


@pytest.mark.parametrize(
    ("cluster", "run_dir", "environ", "sentence"),
    [
        (ClusterSettings(), "/r", TORCHRUN, "torchrun started 3 of this command, and cluster=local would make as many runs"),
        (metal(), "/r", {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "give --nproc-per-node 1"),
        (metal(nodes=4), "/r", TORCHRUN, "cluster.nodes=4, but torchrun says WORLD_SIZE=3: leave the setting out"),
        (metal(nodes=2), "/r", {}, "cluster.node_rank is not set, and torchrun did not start this command"),
        (
            metal(nodes=2, node_rank=1),
            None,
            {},
            "2 hosts without cluster.key_file meet in the run directory, and run_dir names none",
        ),
        (metal(nodes=2, node_rank=1, key_file="/no/such"), None, {}, "cluster.key_file=/no/such can't be read"),
    ],
)
def test_what_is_left_open_is_refused(
    cluster: ClusterSettings, run_dir: str | None, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(PlanError) as refused:
        identify_node(cluster, run_dir, environ)
    assert sentence in str(refused.value)


def test_a_key_file_needs_the_heads_address(key: str) -> None:
    with pytest.raises(PlanError, match=r"cluster.key_file needs cluster.head=host:port"):
        identify_node(metal(nodes=2, node_rank=1, key_file=key), None, {})


def test_a_key_is_for_its_owner_alone_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_key(path)) == 32
    with pytest.raises(FileExistsError):
        write_key(path)
    path.chmod(0o640)
    with pytest.raises(BadKeyFile, match=r"is open to others .mode 640.: chmod 600 it"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("hello")
    with pytest.raises(BadKeyFile, match=r"holds no key: make one with .python -m telescope.run --new-key"):
        read_key(path)


def test_every_node_has_its_own_pair_under_the_one_key() -> None:
    keys = {derive_keys(bytes(32), name).secret for name in ("head", "node-1", "node-2")} | {
        derive_keys(bytes([1] * 32), "head").secret
    }
    assert len(keys) == 4
    assert all(len(secret) == 40 for secret in keys)
    assert derive_keys(bytes(32), "head").public != derive_keys(bytes(32), "node-1").public


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "fd00::1:80", "a b:80", "tcp://a:80"])
def test_a_head_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an address of a host and a port, such as 10.0.0.1:29400"):
        split_address(text)


def test_addresses_of_this_host() -> None:
    assert find_local_address("lo") == "127.0.0.1"
    assert find_local_address("127.0.0.3") == "127.0.0.3"
    assert find_local_address(None, "127.0.0.1") == "127.0.0.1"
    assert find_head_address("localhost", "127.0.0.2") == "127.0.0.2"
    assert find_interface("127.0.0.9") == "lo"
    assert format_endpoint("fd00::1", 80) == "tcp://[fd00::1]:80"
    assert not is_own_address("192.0.2.7")


@pytest.mark.parametrize(
    ("interface", "sentence"),
    [
        ("0.0.0.0", "means all of them"),
        ("192.0.2.7", "is not an address of this host"),
        ("tel9", "has no address here; there are "),
    ],
)
def test_an_interface_that_is_none_is_refused(interface: str, sentence: str) -> None:
    with pytest.raises(NoAddress, match=rf"cluster.interface={interface} {sentence}"):
        find_local_address(interface)


def test_a_head_elsewhere_is_refused() -> None:
    with pytest.raises(NoAddress, match=r"192.0.2.7 .192.0.2.7. is not an address of this host, which is the head"):
        find_head_address("192.0.2.7", None)


def test_a_kept_port_is_given_to_no_one_and_serves_who_names_it() -> None:
    kept = KeptPort("127.0.0.1")
    with socket.create_server(("127.0.0.1", kept.number)) as server, socket.create_connection(("127.0.0.1", kept.number)):
        server.accept()[0].close()
    kept.close()
