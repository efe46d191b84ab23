"""Functions for the loopback interface. Processes on other machines cannot reach this interface."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from ipaddress import ip_address

import psutil

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback address on every machine. Host names other than localhost are not
    loopback addresses on every machine.
    """
    try:
        return address == "localhost" or ip_address(address).is_loopback
    except ValueError:  # a host name
        return False


def keep_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen on the loopback interface only, unless ``environ`` already names an interface.

    By default, gloo listens on the interface to which the host name resolves, and NCCL prefers all other interfaces to
    the loopback interface.
    """
    name = interface_of(LOOPBACK)
    if name is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        environ.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with the IPv4 ``address``; None if no interface has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    return None
