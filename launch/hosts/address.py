"""Addresses of this host: the one that a network interface has, the one on the way to a peer, and a port kept free on it.

Asks the kernel and sends nothing. Refuses to choose an address that means all of them.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

SIOCGIFADDR = 0x8915
ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that documentation keeps for examples (RFC 5737, RFC 3849): the way to them is the way out of this host."""


class NoAddress(OSError):
    """This host has no such address. The text names the setting and the remedy."""


def find_local_address(interface: str | None, facing: str | None = None) -> str:
    """The address of `interface` (itself an address, or a name such as `eth0`); else the one on the way to `facing`, an address
    or a name of another host; else the one on the way out, or the only one. Raises `NoAddress`."""
    if interface is not None:
        return _find_interface_address(interface)
    if facing is not None:
        return _find_address_towards(resolve_address(facing))
    for elsewhere in ELSEWHERE:
        try:
            return _find_address_towards(elsewhere)
        except NoAddress:
            continue
    return _find_only_address()


def find_head_address(host: str, interface: str | None) -> str:
    """The address at which the head listens, where others know it as `host`. Raises `NoAddress` if it is not this host's."""
    if interface is not None:
        return _find_interface_address(interface)
    address = resolve_address(host)
    if not is_own_address(address):
        raise NoAddress(
            f"{host} ({address}) is not an address of this host, which is the head: set cluster.head to one that is, or "
            "cluster.interface to the address of this host behind it"
        )
    return address


def find_interface(address: str) -> str:
    """The name of the interface that has `address`, for the libraries that ask for one; empty where none is found."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for name, own in _list_interfaces() if own == address), "")


def format_endpoint(address: str, port: int) -> str:
    """`tcp://10.0.0.1:29400`, `tcp://[fd00::1]:29400`."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


class KeptPort:
    """A port of `address` that nobody else is given while this object is open, and that one socket with SO_REUSEADDR may use.

    It is bound and does not listen: the kernel hands it out to no one, and lets a socket that names it have it.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


def is_own_address(address: str) -> bool:
    """Whether a socket of this host can have `address`."""
    try:
        with socket.socket(_find_family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _find_interface_address(interface: str) -> str:
    try:
        address = str(ipaddress.ip_address(interface.strip("[]")))
    except ValueError:
        found = [own for name, own in _list_interfaces() if name == interface]
        if not found:
            names = ", ".join(sorted({name for name, _ in _list_interfaces()}))
            raise NoAddress(f"cluster.interface={interface} has no address here; there are {names}") from None
        return found[0]
    if ipaddress.ip_address(address).is_unspecified:
        raise NoAddress(f"cluster.interface={interface} means all of them, and other hosts need one address: name one")
    if not is_own_address(address):
        raise NoAddress(f"cluster.interface={interface} is not an address of this host")
    return address


def _find_only_address() -> str:
    """A host without a way out can still be on one network with the others."""
    found = [(name, own) for name, own in _list_interfaces() if not ipaddress.ip_address(own).is_loopback]
    if len({name for name, _ in found}) == 1:
        return found[0][1]
    names = ", ".join(sorted({name for name, _ in found})) or "none"
    raise NoAddress(f"it is not clear by which network other hosts reach this one ({names}): name it with cluster.interface")


def resolve_address(host: str) -> str:
    """The address of a host. Raises `NoAddress`."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise NoAddress(f"the host {host} can't be found ({error.strerror or error}): give its address") from error


def _find_address_towards(address: str) -> str:
    try:
        with socket.socket(_find_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NoAddress(f"this host has no way to {address} ({error.strerror}): look at its network") from error


def _find_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _list_interfaces() -> list[tuple[str, str]]:
    """Name and IPv4 address of every interface that has one, then those with IPv6."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found + _list_ipv6_interfaces()


def _list_ipv6_interfaces() -> list[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    reaching = (row for row in rows if row[3] != "20")  # 20: of the link only
    return [(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in reaching]
