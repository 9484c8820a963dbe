"""Which hosts may be asked: those of an allow-list, and private addresses only where the list names them.

Private is whatever is not global: loopback, a private network, link-local (cloud metadata lives there), multicast.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def url_problem(url: str) -> str | None:
    """Why `url` is no plain http address, or None."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "it must be http(s)://host[:port]/path"
    if not whole or any(char.isspace() or not char.isprintable() for char in url):
        return "it must be http(s)://host[:port]/path"
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return "it must have no user, password, query or fragment; give a token by RLHF_REWARD_TOKEN"
    return None


def host_of(url: str) -> str:
    """Lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()


def as_network(text: str) -> Network | None:
    """`10.0.0.0/8` or a single address; None for a name. Raises ValueError for a network with host bits."""
    try:
        ipaddress.ip_address(text.partition("/")[0])
    except ValueError:
        return None
    return ipaddress.ip_network(text)


def is_listed(host: str, allowed: Sequence[str]) -> bool:
    """True if the list names the host itself, or a network that holds its address."""
    own = as_network(host)
    if own is None:
        return host in {entry.lower() for entry in allowed}
    return _holds(own.network_address, allowed)


def forbidden(host: str, addresses: Sequence[str], allowed: Sequence[str]) -> str | None:
    """The first address of `host` that may not be connected to, or None.

    A name may stand for a private address only where the list names that address, or a network around it, as well:
    otherwise whoever answers for the name could lead into the private network. `localhost` needs no second entry.
    """
    for text in addresses:
        address = _address(text)
        at_home = host == "localhost" and address.is_loopback
        if not (is_public(text) or at_home or _holds(address, allowed)):
            return text
    return None


def is_public(address: str) -> bool:
    """True for an address of the public internet."""
    found = _address(address)
    return found.is_global and not found.is_multicast


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _holds(address: Address, allowed: Sequence[str]) -> bool:
    networks = [network for entry in allowed if (network := as_network(entry)) is not None]
    return any(address in network for network in networks)
