"""Decides which hosts a request to a reward service or judge may contact.

A host must be in the allow-list. Private addresses are allowed only if the list names them. An address is
private if it is not global: loopback, private networks, link-local addresses (used for cloud metadata) and
multicast. An IPv6 address that contains an IPv4 address, either mapped or for a NAT64 gateway, is treated
like that IPv4 address. Other IPv6 forms that contain an IPv4 address are private.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "::/96",  # IPv4-compatible
            "::ffff:0:0:0/96",  # IPv4-translated
            "64:ff9b:1::/48",  # NAT64 of a private network
            "2002::/16",  # 6to4
            "192.88.99.0/24",  # 6to4 relays
            "fec0::/10",  # site-local
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
        ),
    )
)
"""Special networks that `ipaddress` treats as global in all or some Python versions."""
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)


def url_problem(url: str, token: str) -> str | None:
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


def as_network(text: str) -> Network | None:
    """Parse `10.0.0.0/8` or a single address. Returns None for a name.

    Raises ValueError for a network with host bits.
    """
    try:
        ipaddress.ip_address(text.partition("/")[0])
    except ValueError:
        return None
    return ipaddress.ip_network(text)


def is_listed(host: str, allowed: Sequence[str]) -> bool:
    """Return whether the list has the host itself, or a network that contains its address."""
    own = as_network(host)
    if own is None:
        return host in {entry.lower() for entry in allowed}
    return _holds(own.network_address, allowed)


def _check_allowed_hosts(allowed: tuple[str, ...]) -> tuple[str, ...]:
    for entry in allowed:
        try:
            is_name = as_network(entry) is None
        except ValueError as error:
            raise ValueError(f"allowed_hosts must hold networks without host bits; {error}") from None
        if is_name and not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", entry):
            raise ValueError(
                f"allowed_hosts must hold host names, addresses or networks; got {entry!r}; leave scheme,"
                " port and path out"
            )
    return allowed


AllowedHosts = Annotated[tuple[str, ...], AfterValidator(_check_allowed_hosts)]
"""An allow-list: host names, addresses and networks."""


def check_url(
    url: str, allowed: Sequence[str], field: str, token: str = "the variable in api_key_env"
) -> None:
    """Raise ValueError unless `url` is a plain HTTP address of a listed host.

    Args:
        url: The address. The message contains its host only.
        allowed: The allow-list.
        field: Name of the address in the message.
        token: Where the token of the service is given, for the message.
    """
    if problem := url_problem(url, token):
        raise ValueError(f"{field}: {problem}")
    if not is_listed(host_of(url), allowed):
        raise ValueError(
            f"{field} must lead to allowed_hosts ({', '.join(allowed) or 'none'}); got {host_of(url)}; add it"
            " there"
        )


def forbidden(host: str, addresses: Sequence[str], allowed: Sequence[str]) -> str | None:
    """Return the first address of `host` that may not be connected to, or None.

    A name may have a private address only if the list also has that address, or a network that contains it.
    Otherwise the owner of the name could direct requests into the private network. `localhost` needs no
    second entry.
    """
    for text in addresses:
        address = _address(text)
        at_home = host == "localhost" and address.is_loopback
        if not (is_public(text) or at_home or _holds(address, allowed)):
            return text
    return None


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet."""
    parsed = _address(address)
    special = any(parsed in network for network in _NOT_PUBLIC if network.version == parsed.version)
    return parsed.is_global and not parsed.is_multicast and not special


def _address(text: str) -> Address:
    """Parse an address. Returns the contained IPv4 address if it is mapped or for a NAT64 gateway."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def _holds(address: Address, allowed: Sequence[str]) -> bool:
    networks = [network for entry in allowed if (network := as_network(entry)) is not None]
    return any(address in network for network in networks)
