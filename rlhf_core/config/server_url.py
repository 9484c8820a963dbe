"""Addresses of servers that are asked over HTTP: reward services, judges, MLflow and S3."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)


def url_problem(url: str, token: str = "the variable in api_key_env") -> str | None:
    """Return the reason for which `url` is no plain HTTP address, or None.

    Args:
        url: The address.
        token: Where the token of the service is given, for the message.
    """
    if problem := server_problem(url):
        return problem
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return f"it must have no user, password, query or fragment; give a token by {token}"
    return None


def server_problem(url: str) -> str | None:
    """Return the reason for which no server can be at `url`, or None."""
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for a text and for numbers above 65535.
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "it must be http(s)://host[:port]/path"
    if not whole or any(char.isspace() or not char.isprintable() for char in url):
        return "it must be http(s)://host[:port]/path"
    return _host_problem(host_of(url))


def _host_problem(host: str) -> str | None:
    """Return the reason for which `host` is neither an address nor an unambiguous host name, or None.

    The name must be interpreted in the same way by every resolver and HTTP client.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return None
    except ValueError:
        pass
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        return (
            "its host must be an address or a name of letters, digits, hyphens and dots (others as xn--...)"
        )
    # Resolvers take `127.1`, `0x7f.1` and `2130706433` for addresses, which `ip_address` above does not.
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        return "its host must be written as four decimal numbers without leading zeros, such as 127.0.0.1"
    for label in labels:
        if label.startswith("xn--"):
            try:
                label.encode("ascii").decode("idna")
            except UnicodeError:
                return f"its host has the label {label}, which is not a valid name"
    return None


def host_of(url: str) -> str:
    """Return the host of a URL in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()
