"""Which sockets a process and its children listen on: read from the kernel, as an outsider would find them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    """One TCP socket that somebody can connect to."""

    program: str
    pid: int
    address: str
    port: int


def listeners(root: int) -> list[Listener]:
    """Those of the process `root` and of all below it."""
    found = []
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            name, sockets = _name(process), process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        found += [Listener(name, process.pid, *s.laddr) for s in sockets if s.status == psutil.CONN_LISTEN]
    return found


def beyond_loopback(found: Iterable[Listener]) -> list[Listener]:
    """Those that another host could reach."""
    return [entry for entry in found if not ipaddress.ip_address(entry.address.partition("%")[0]).is_loopback]


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return Path(words[0]).name.split()[0].rstrip(":") if words else process.name()
