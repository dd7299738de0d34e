"""Bind the stores of a job to the address that the job names, not to all interfaces.

torch's TCPStore listens on every interface. Anyone who can connect can read and write it, and ranks unpickle what they
read from it. `tutti run` on one machine needs only the loopback interface.
"""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

MAKERS = ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")


def listen_where_named() -> None:
    """Make stores that torch.distributed creates in this process listen on the address of their host name."""
    for name in MAKERS:
        vars(import_module(name))["TCPStore"] = _store


def _store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> TCPStore:
    """A TCPStore. Falls back to torch's own if the address is in use, or is not of this machine."""
    if is_master and (listening := _listen(host_name, port)):
        with_port = listening.getsockname()[1]
        handle = listening.detach()  # the store closes it
        return TCPStore(host_name, with_port, *args, is_master=True, master_listen_fd=handle, **kwargs)
    return TCPStore(host_name, port, *args, is_master=is_master, **kwargs)


def _listen(host: str, port: int) -> socket.socket | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener
