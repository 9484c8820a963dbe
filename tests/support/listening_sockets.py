"""Listening TCP sockets of a process and its children, as the kernel reports them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    """One listening TCP socket."""

    program: str
    pid: int
    address: str
    port: int


def listeners(root: int) -> list[Listener]:
    """Return the listening sockets of the process `root` and all its descendants."""
    result = []
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            name, sockets = _name(process), process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        result += [Listener(name, process.pid, *s.laddr) for s in sockets if s.status == psutil.CONN_LISTEN]
    return result


def beyond_loopback(entries: Iterable[Listener]) -> list[Listener]:
    """Return the listeners that another host can reach."""
    return [
        entry for entry in entries if not ipaddress.ip_address(entry.address.partition("%")[0]).is_loopback
    ]


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return Path(words[0]).name.split()[0].rstrip(":") if words else process.name()
