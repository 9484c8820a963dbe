"""The address on which a server of a command listens."""

from __future__ import annotations

import socket

from rlhf_core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address of this machine. Port 0 is any free one.

    Raises ConfigError, which names `--host` and `--port`, if there is no such address or it is in use.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port must be from 0 to 65535; got {port}")
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(kind, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be a free address of this machine; got {host} {port}: {error}"
        ) from error
    return bound
