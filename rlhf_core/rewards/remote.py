"""A reward service over HTTP: `type: remote` of `ppo.rewards`.

One request is a POST of JSON to a replica's url, with `Authorization: Bearer $RLHF_REWARD_TOKEN` where that
variable is set in the environment:

    {"items": [{"prompt": "...", "response": "...", "prompt_id": "...", "meta": {...}, "finished": true},
    ...]}

`prompt` and `response` are plain text without special tokens; `meta` is what the prompt's row had besides;
`finished` is false where the length limit cut the response. With `send_tokens` each item also has
`prompt_ids` and `response_ids`, the tokens as the policy saw and wrote them. The answer is status 200 and one
score per item, in order:

    {"scores": [0.25, null, ...], "errors": {"1": "why item 1 has no score"}}

null (or a number that is not finite) is an item without a score; `errors` may be left out. Any other status
is a failure of the whole request. 400, 413 and 422 are the fault of an item, which is searched for by asking
for parts; 3xx, 401, 403, 404, 405 and 415 end the step (redirects are not followed); all others are tried
again.

    samples -> requests of `items_per_request` -> least busy replica -> scores
                 ^                                    | failure
                 +------- backoff with jitter --------+

A request takes `timeout` seconds at most, all in all. The host's addresses are looked up and checked against
`allowed_hosts` for each request, and exactly those are connected to; proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import httpx

from rlhf_core.config.hosts import forbidden, host_of, is_public
from rlhf_core.config.rewards import RemoteReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.failures import Failure, Outcome, Refused, isolate
from rlhf_core.rewards.replicas import Breaker, Replica, Replicas
from rlhf_core.rewards.token import TOKEN_VARIABLE, reward_token
from rlhf_core.types import RewardInput

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 4 << 20

_REFUSED = {400, 413, 422}
_FIXES = {
    401: f"give its token by {TOKEN_VARIABLE}",
    403: f"give its token by {TOKEN_VARIABLE}",
    404: "correct the path of the url",
    405: "correct the path of the url",
    415: "it must take application/json",
}
_FINAL = {*range(300, 400), *_FIXES}


class RemoteService:
    """Callable `Sequence[RewardInput] -> Outcome`; belongs to one thread. `close` it.

    A batch is bounded: each request has `1 + retries` tries, each of which waits at most `timeout` +
    `breaker_seconds` for a replica that may be asked, and `timeout` for its answer.
    """

    def __init__(self, source: RemoteReward) -> None:
        self._source = source
        self._name = source.name or source.type
        self._token = reward_token()
        for url in source.urls:
            try:
                _ = httpx.URL(url).host, httpx.URL(url).netloc
            except (httpx.InvalidURL, ValueError) as error:
                raise ConfigError(
                    f"ppo.rewards.{self._name}.urls: {url} is no address that can be asked ({error}); correct"
                    " its host"
                ) from error
        replicas = [
            Replica(url, Breaker(source.breaker_failures, source.breaker_seconds)) for url in source.urls
        ]
        self._replicas = Replicas(replicas, source.concurrency, source.timeout + source.breaker_seconds)
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            timeout=None,  # `_once` bounds the whole request
            limits=httpx.Limits(max_connections=None),
            verify=ssl.create_default_context(),
            trust_env=False,
        )

    def __call__(self, samples: Sequence[RewardInput]) -> Outcome:
        """Raises `RewardError` where no try can help: a refused address, a wrong token or path."""
        size = self._source.items_per_request
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        values: list[float] = []
        reasons: dict[int, str] = {}
        hopeless = False
        for part, answer in zip(parts, self._runner.run(self._all(parts)), strict=True):
            if not isinstance(answer, Failure):
                outcome = answer
            elif hopeless:
                outcome = Outcome.failed(len(part), str(answer))
            else:
                outcome = isolate(self._again, part, answer)
                # Where nothing of a request works it is not its samples: the other requests need no search.
                hopeless = 1 < len(part) == len(outcome.reasons)
            reasons |= {len(values) + index: reason for index, reason in outcome.reasons.items()}
            values += outcome.values
        return Outcome(values, reasons)

    def close(self) -> None:
        """Ends the connections; a second call does nothing."""
        if not self._client.is_closed:
            self._runner.run(self._client.aclose())
            self._runner.close()

    async def _all(self, parts: Sequence[Sequence[RewardInput]]) -> list[Outcome | Failure]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._with_retries(part)) for part in parts]
        except* RewardError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _with_retries(self, samples: Sequence[RewardInput]) -> Outcome | Failure:
        tries = self._source.retries + 1
        last: Outcome | Failure = Failure("it was never tried")
        for number in range(tries):
            if number:
                await asyncio.sleep(self._source.backoff * 2 ** (number - 1) * random.uniform(0.5, 1.5))
            try:
                last = outcome = await self._once(samples)
            except Failure as failure:
                logger.warning("reward %s: try %d of %d failed: %s", self._name, number + 1, tries, failure)
                last = failure
                if isinstance(failure, Refused):
                    break
            else:
                if not outcome.reasons:
                    break
        return last

    def _again(self, samples: Sequence[RewardInput]) -> Outcome:
        return self._runner.run(self._once(samples, searching=True))

    async def _once(self, samples: Sequence[RewardInput], *, searching: bool = False) -> Outcome:
        replica = await self._replicas.take()
        with self._replicas.use(replica, searching=searching):
            place = httpx.URL(replica.url).netloc.decode()
            body = json.dumps({"items": [self._item(sample) for sample in samples]}).encode()
            try:
                async with asyncio.timeout(self._source.timeout):
                    status, answer = await self._post(replica.url, body)
            except TimeoutError:
                late = f"{place} gave no answer within {self._source.timeout:g} s"
                raise Failure(late, searchable=False) from None
            except (httpx.HTTPError, OSError) as error:
                cause = str(error) or type(error).__name__
                raise Failure(f"{place} cannot be asked: {cause}", searchable=False) from error
            if status in _FINAL:
                raise RewardError(
                    f"reward {self._name}: {replica.url} answers with status {status}, which no further try"
                    f" can change; {_FIXES.get(status, 'give its final address: redirects are not followed')}"
                )
            if status != 200:
                kind = Refused if status in _REFUSED else Failure
                told = f"{place} answers with status {status}: {answer[:200]!r}"
                raise kind(told, searchable=status in _REFUSED | {500})
            return read_answer(answer, len(samples), place)

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        addresses = await self._addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._post_to(address, url, body)
            except httpx.ConnectError:
                continue
        return await self._post_to(addresses[-1], url, body)

    async def _addresses(self, url: str) -> list[str]:
        """Of the url's host. Raises `RewardError` if one of them may not be connected to."""
        host, whole = host_of(url), httpx.URL(url)
        found = await asyncio.get_running_loop().getaddrinfo(host, whole.port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if address := forbidden(host, addresses, self._source.allowed_hosts):
            raise RewardError(
                f"reward {self._name}: {host} leads to {address}, which is a private address; if that is"
                " meant, add the address or its network to allowed_hosts"
            )
        if self._token and whole.scheme == "http" and any(map(is_public, addresses)):
            raise RewardError(
                f"reward {self._name}: {TOKEN_VARIABLE} must not travel in clear text to {host}, a public"
                " address; use https"
            )
        return addresses

    async def _post_to(self, address: str, url: str, body: bytes) -> tuple[int, bytes]:
        """(status, body) from exactly this address; the certificate is checked against the url's own host."""
        whole = httpx.URL(url)
        headers = {
            "Host": whole.netloc.decode(),
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = self._client.build_request(
            "POST",
            whole.copy_with(host=address),
            content=body,
            headers=headers,
            extensions={"sni_hostname": whole.host},
        )
        response = await self._client.send(request, stream=True)
        try:
            answer = b""
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, answer
        finally:
            await response.aclose()

    def _item(self, sample: RewardInput) -> dict[str, Any]:
        item = {
            "prompt": sample.prompt,
            "response": sample.response,
            "prompt_id": sample.prompt_id,
            "meta": sample.meta,
            "finished": sample.finished,
        }
        if self._source.send_tokens:
            item |= {"prompt_ids": sample.prompt_ids, "response_ids": sample.response_ids}
        return item


def read_answer(body: bytes, count: int, place: str) -> Outcome:
    """The scores in an answer for `count` items. Raises `Failure` for anything that the protocol does not
    allow.
    """
    try:
        answer = json.loads(body)
        scores, errors = answer["scores"], answer.get("errors", {})
        values = [math.nan if score is None else _number(score) for score in scores]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Failure(
            f'{place} must answer {{"scores": [...]}} with numbers; got {body[:80]!r} ({error})'
        ) from error
    if len(values) != count:
        raise Failure(f"{place} gave {len(values)} scores for {count} items")
    outcome = Outcome.of(values)
    told = errors if isinstance(errors, dict) else {}
    reasons = {
        index: f"{place} says: {str(told[str(index)])[:200]!r}" if str(index) in told else reason
        for index, reason in outcome.reasons.items()
    }
    return Outcome(outcome.values, reasons)


def _number(score: object) -> float:
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise TypeError(f"{str(score)[:40]!r} is no number")
    return float(score)
