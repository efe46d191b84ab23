"""Which network interface the ranks talk over."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

import psutil

from roomier.core.world import World

_ANYWHERE = "192.0.2.1"  # an address of no machine (RFC 5737): what leads there is the default route


def choose_interface(world: World, address: str, environ: MutableMapping[str, str]) -> None:
    """Tell gloo its interface, unless the user did (``GLOO_SOCKET_IFNAME``).

    By itself gloo takes the one that the machine's own name leads to: none where the name does not resolve, and on
    many Linux systems the loopback, over which no other node can be reached.

    Args:
        address: of rank 0.
    """
    if "GLOO_SOCKET_IFNAME" in environ:
        return
    name = _interface_of("127.0.0.1") if world.local_size == world.size else _interface_towards(address)
    if name is not None:
        environ["GLOO_SOCKET_IFNAME"] = name


def _interface_towards(address: str) -> str | None:
    try:
        target = socket.gethostbyname(address)
    except OSError:
        return None
    if target.startswith("127.") and address not in ("localhost", target):
        target = _ANYWHERE  # rank 0 looks up its own name and finds the loopback
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 1))  # sends nothing: the system only chooses where it would go out
        except OSError:
            return None
        own: str = probe.getsockname()[0]
    return _interface_of(own)


def _interface_of(own_address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == own_address for each in addresses):
            return name
    return None
