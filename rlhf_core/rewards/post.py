"""POST requests to hosts of an allow-list, for reward services and judges.

The addresses of the host are resolved and checked against the list for each request, and only those are
connected to. Redirects and proxies of the environment are not used. A token is not sent in clear text to a
public address.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

import httpx

from rlhf_core.config.hosts import forbidden, host_of, is_public
from rlhf_core.errors import RewardError

MAX_ANSWER_BYTES = 4 << 20


class Poster:
    """Sends requests in one event loop. Call `close` at the end.

    Args:
        name: Who asks, for messages.
        allowed_hosts: Hosts, addresses and networks that may be connected to.
        token: Is sent in the header `Authorization`; None for none.
        token_variable: The environment variable that has the token, for messages.
    """

    def __init__(
        self, name: str, allowed_hosts: Sequence[str], token: str | None, token_variable: str | None
    ) -> None:
        self._name = name
        self._allowed_hosts = allowed_hosts
        self._token = token
        self._token_variable = token_variable
        # Reads SSL_CERT_FILE. The default of httpx does not if `trust_env` is false.
        self._tls = ssl.create_default_context()
        self._clients: dict[str, httpx.AsyncClient] = {}
        """One for each host. A client keeps connections by address, and would use one whose certificate was
        checked against another host of this address.
        """
        self.is_closed = False

    async def close(self) -> None:
        """Close the connections."""
        self.is_closed = True
        for client in self._clients.values():
            await client.aclose()

    async def post(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer.

        Raises:
            RewardError: The address is forbidden, or the token would be sent in clear text.
            httpx.HTTPError: No address of the host answers, or the answer is too long.
            OSError: The name of the host cannot be resolved.
        """
        addresses = await self._addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._post_to(address, url, body)
            except httpx.ConnectError:
                # No request was sent yet. After another error the host may have received it.
                continue
        return await self._post_to(addresses[-1], url, body)

    async def _addresses(self, url: str) -> list[str]:
        """Return the addresses of the url's host. Raises `RewardError` if one of them is forbidden."""
        host, whole = host_of(url), httpx.URL(url)
        resolved = await asyncio.get_running_loop().getaddrinfo(host, whole.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in resolved))
        if address := forbidden(host, addresses, self._allowed_hosts):
            raise RewardError(
                f"{self._name}: {host} leads to {address}, which is a private address; if that is"
                " meant, add the address or its network to allowed_hosts"
            )
        if self._token and whole.scheme == "http" and any(map(is_public, addresses)):
            raise RewardError(
                f"{self._name}: {self._token_variable} must not travel in clear text to {host}, a public"
                " address; use https"
            )
        return addresses

    async def _post_to(self, address: str, url: str, body: bytes) -> tuple[int, bytes]:
        """Return (status, body) from this address; the certificate is checked against the url's host."""
        whole = httpx.URL(url)
        headers = {
            "Host": whole.netloc.decode(),
            "Content-Type": "application/json",
            # Not compressed: `aiter_raw` below, whose bytes are counted, does not decompress.
            "Accept-Encoding": "identity",
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        client = self._client_of(whole.host)
        request = client.build_request(
            "POST",
            whole.copy_with(host=address),
            content=body,
            headers=headers,
            extensions={"sni_hostname": whole.host},
        )
        response = await client.send(request, stream=True)
        try:
            answer = b""
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, answer
        finally:
            await response.aclose()

    def _client_of(self, host: str) -> httpx.AsyncClient:
        if host not in self._clients:
            self._clients[host] = httpx.AsyncClient(
                timeout=None,  # the caller limits the whole request
                # The callers limit the number of requests. By default, httpx lets those above 100 wait.
                limits=httpx.Limits(max_connections=None),
                verify=self._tls,
                trust_env=False,
            )
        return self._clients[host]
