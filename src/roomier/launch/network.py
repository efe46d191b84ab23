"""Selection of the network interface that the ranks use."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

from roomier.core.loopback import interface_of, keep_on_loopback
from roomier.core.world import World

_ANYWHERE = "192.0.2.1"  # this address is reserved for documentation (RFC 5737), so packets to it use the default route


def choose_interface(world: World, address: str, environ: MutableMapping[str, str]) -> None:
    """Set the network interface of gloo. If all ranks run on one machine, also set the interface of NCCL. An interface
    that the user has set is not changed.

    By default, gloo uses the interface to which the host name resolves. If the host name does not resolve, gloo has no
    interface. On many Linux systems, the host name resolves to the loopback interface, over which other nodes are
    unreachable.

    Args:
        address: host name or IP address of rank 0.
    """
    if world.local_size == world.size:
        keep_on_loopback(environ)
    elif "GLOO_SOCKET_IFNAME" not in environ and (name := _interface_towards(address)) is not None:
        environ["GLOO_SOCKET_IFNAME"] = name


def _interface_towards(address: str) -> str | None:
    try:
        target = socket.gethostbyname(address)
    except OSError:
        return None
    if target.startswith("127.") and address not in ("localhost", target):
        target = _ANYWHERE  # rank 0 may resolve its own host name to the loopback interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 1))  # this call sends no packet; the system only selects the route
        except OSError:
            return None
        own: str = probe.getsockname()[0]
    return interface_of(own)
