"""Ports of ranks that are all on one machine: nobody else should reach them."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from difftrain.distributed.launch import Launch

BACKLOG = 4096
_ARGUMENTS = ("host_name", "port", "world_size", "is_master", "timeout")  # of a TCPStore, by position


def is_loopback(host: str) -> bool:
    """Say whether a name or address is this machine's own, for itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def loopback_only(launch: Launch) -> Iterator[None]:
    """Let the process group that is opened inside listen on the loopback alone, where all ranks are on this machine.

    A store that torchrun has opened itself is not ours to bind: `difftrain launch` does it there.
    """
    if launch.size != launch.local_size or not is_loopback(launch.master_addr):
        yield
        return
    if sys.platform == "linux" and not is_loopback(_own_address()):  # gloo listens where the host's name leads
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with stores_on_loopback("torch.distributed.rendezvous"):
        yield


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


@contextmanager
def stores_on_loopback(*modules: str) -> Iterator[None]:
    """Let the TCPStore of modules listen on the loopback: torch's own binds every interface, and asks for no secret."""
    from torch._C._distributed_c10d import TCPStore

    def made(*args: Any, **named: Any) -> Any:
        arguments = dict(zip(_ARGUMENTS, args)) | named
        if not arguments.get("is_master"):
            return TCPStore(**arguments)
        listener = socket.create_server(("127.0.0.1", int(arguments["port"])), backlog=BACKLOG)
        arguments |= {"host_name": "127.0.0.1", "port": listener.getsockname()[1]}
        return TCPStore(**arguments, master_listen_fd=listener.detach())  # the store closes it, also where it fails

    patched = [module for module in map(import_module, modules) if module.__dict__.get("TCPStore") is TCPStore]
    for module in patched:
        vars(module)["TCPStore"] = made
    try:
        yield
    finally:
        for module in patched:
            vars(module)["TCPStore"] = TCPStore
