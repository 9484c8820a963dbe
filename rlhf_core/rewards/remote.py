"""A reward service over HTTP: `type: remote` of `ppo.rewards`.

One request is a POST of JSON to a replica's url, with `Authorization: Bearer $RLHF_REWARD_TOKEN` where that
variable is set in the environment:

    {"items": [{"prompt": "...", "response": "...", "prompt_id": "...", "meta": {...}, "finished": true},
    ...]}

`prompt` and `response` are plain text without special tokens; `meta` has the other fields of the prompt's
row; `finished` is false if the length limit cut the response. With `send_tokens` each item also has
`prompt_ids` and `response_ids`, the tokens that the policy read and generated. The answer is status 200 and
one score per item, in order:

    {"scores": [0.25, null, ...], "errors": {"1": "why item 1 has no score"}}

null (or a number that is not finite) is an item without a score; `errors` is optional. Any other status is a
failure of the whole request (`post.status_kind`). A refused one is caused by an item, which is searched for
with smaller requests; a final one ends the step; a temporary one is retried.

    samples -> requests of `items_per_request` -> least busy replica -> scores
                 ^                                    | failure
                 +------- backoff with jitter --------+

    circuit breaker of each replica:
    closed --`breaker_failures` in a row--> open --`breaker_seconds` pass--> half-open: one request is sent
      ^                                      ^                                 |
      |                                      +---------- it fails -------------+
      +--------------------------- it succeeds --------------------------------+

The total time of a request is limited to `timeout` seconds. `rewards.post` describes the allowed addresses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import retry_if_exception, retry_if_result

from rlhf_core.config.rewards import RemoteReward
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.access_token import TOKEN_VARIABLE, reward_token
from rlhf_core.rewards.failures import (
    Failure,
    Outcome,
    Refused,
    has_missing_values,
    isolate,
)
from rlhf_core.rewards.post import NoAnswer, Poster, request_group, retrying, status_fix, status_kind
from rlhf_core.types import RewardInput

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


class Breaker:
    """A circuit breaker. Check `allows`, then call `began`, and then `succeeded` or `failed`."""

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._in_row = 0
        self._opened: float | None = None
        self._requests = 0
        self._probe: int | None = None
        """Number of the request that is sent while the breaker is open."""

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        if self._opened is None:
            return True
        return self._probe is None and self._clock() >= self._opened + self._seconds

    def began(self) -> int:
        """Record the start of a request. Return its number."""
        self._requests += 1
        if self._opened is not None:
            self._probe = self._requests
        return self._requests

    def succeeded(self) -> None:
        """Record a success: the breaker closes."""
        self._in_row, self._opened, self._probe = 0, None, None

    def failed(self, request: int) -> None:
        """Record the failure of the request with this number, which may open the breaker.

        The request may have begun before the breaker opened. The probe then continues.
        """
        self._in_row += 1
        if self._in_row >= self._limit:
            self._opened = self._clock()
        if request == self._probe:
            self._probe = None


@dataclass
class Replica:
    """One address of the service."""

    url: str
    breaker: Breaker
    active: int = 0
    """Number of requests that have no answer yet."""
    requests: int = 0
    """Number of requests so far."""


class ReplicaPool:
    """Selects the least busy replica, with at most `concurrency` requests at a time each;
    for one event loop.
    """

    def __init__(self, replicas: Sequence[Replica], concurrency: int, timeout: float) -> None:
        """`timeout`: seconds that `acquire` waits while the breakers of all replicas are open."""
        self._replicas = replicas
        self._concurrency = concurrency
        self._timeout = timeout

    async def acquire(self) -> Replica:
        """Return the replica with the fewest active requests, then the fewest so far; `use` it at once.

        Raises `Failure` if the breakers of all stay open.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            allowed = [replica for replica in self._replicas if replica.breaker.allows]
            free = [replica for replica in allowed if replica.active < self._concurrency]
            if free:
                chosen = min(free, key=lambda replica: (replica.active, replica.requests))
                chosen.active += 1
                chosen.requests += 1
                return chosen
            if allowed:
                # Busy, but not broken: their requests end within their own time limit.
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() >= deadline:
                raise Failure(f"none of its {len(self._replicas)} replicas answers", searchable=False)
            await asyncio.sleep(_POLL_SECONDS)

    @contextmanager
    def use(self, replica: Replica, *, searching: bool = False) -> Iterator[None]:
        """Wrap one request to an acquired replica, and record its result.

        `Refused` counts as a success of the replica. So does, during the search for bad samples
        (`searching`), any failure that a sample may have caused.
        """
        request = replica.breaker.began()
        try:
            yield
        except Failure as failure:
            if isinstance(failure, Refused) or (searching and failure.searchable):
                replica.breaker.succeeded()
            else:
                replica.breaker.failed(request)
            raise
        finally:
            replica.active -= 1
        replica.breaker.succeeded()


class RemoteService:
    """Callable `Sequence[RewardInput] -> Outcome`, for one thread. Call `close` at the end.

    The time of a batch is limited. Each request has `1 + retries` attempts. An attempt waits while the
    replicas are busy with other requests, at most `timeout` + `breaker_seconds` if the breakers of all are
    open, and at most `timeout` for its answer.
    """

    def __init__(self, source: RemoteReward) -> None:
        self._source = source
        self._name = source.used_name
        for url in source.urls:
            try:
                # httpx decodes a host in Punycode only when the property is read, and raises then.
                _ = httpx.URL(url).host, httpx.URL(url).netloc
            except (httpx.InvalidURL, ValueError) as error:
                raise ConfigError(
                    f"ppo.rewards.{self._name}.urls: {url} is no address that can be asked ({error}); correct"
                    " its host"
                ) from error
        replicas = [
            Replica(url, Breaker(source.breaker_failures, source.breaker_seconds)) for url in source.urls
        ]
        self._replicas = ReplicaPool(replicas, source.concurrency, source.timeout + source.breaker_seconds)
        # One event loop for all batches, because the open connections of the poster belong to it.
        self._runner = asyncio.Runner()
        self._poster = Poster(f"reward {self._name}", source.allowed_hosts, reward_token(), TOKEN_VARIABLE)

    def __call__(self, samples: Sequence[RewardInput]) -> Outcome:
        """Score samples.

        Raises `RewardError` if no retry can help: a forbidden address, a wrong token or path.
        """
        size = self._source.items_per_request
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        values: list[float] = []
        reasons: dict[int, str] = {}
        all_fail = False
        for part, answer in zip(parts, self._runner.run(self._all(parts)), strict=True):
            if not isinstance(answer, Failure):
                outcome = answer
            elif all_fail:
                outcome = Outcome.failed(len(part), str(answer))
            else:
                outcome = isolate(self._score_part, part, answer)
                # If all samples of a request fail, the cause is not in the samples: no further search.
                all_fail = 1 < len(part) == len(outcome.reasons)
            reasons |= {len(values) + index: reason for index, reason in outcome.reasons.items()}
            values += outcome.values
        return Outcome(values, reasons)

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        if not self._poster.is_closed:
            self._runner.run(self._poster.close())
            self._runner.close()

    async def _all(self, parts: Sequence[Sequence[RewardInput]]) -> list[Outcome | Failure]:
        async with request_group() as group:
            tasks = [group.create_task(self._with_retries(part)) for part in parts]
        return [task.result() for task in tasks]

    async def _with_retries(self, samples: Sequence[RewardInput]) -> Outcome | Failure:
        retry = retry_if_exception(_may_pass) | retry_if_result(has_missing_values)
        attempts = retrying(f"reward {self._name}", self._source, retry)
        answers: list[Outcome] = []

        async def attempt() -> Outcome:
            answers.append(await self._once(samples))
            return answers[-1]

        try:
            outcome: Outcome = await attempts(attempt)
        except Failure as failure:
            if answers:  # of an earlier try: some scores were missing
                return answers[-1]
            if isinstance(failure, Refused):  # not retried, so tenacity did not call `after`
                log.warning("reward %s: refused: %s", self._name, failure)
            # Not raised, because the task group would cancel the other requests.
            return failure
        return outcome

    def _score_part(self, samples: Sequence[RewardInput]) -> Outcome:
        return self._runner.run(self._once(samples, searching=True))

    async def _once(self, samples: Sequence[RewardInput], *, searching: bool = False) -> Outcome:
        replica = await self._replicas.acquire()
        with self._replicas.use(replica, searching=searching):
            address = httpx.URL(replica.url).netloc.decode()
            body = json.dumps({"items": [self._item(sample) for sample in samples]}).encode()
            try:
                status, answer, _ = await self._poster.post(replica.url, body, self._source.timeout)
            except NoAnswer as error:
                raise Failure(f"{address} {error}", searchable=False) from error
            kind = status_kind(status)
            if kind == "final":
                fix = status_fix(status, f"give its token by {TOKEN_VARIABLE}", "correct the path of the url")
                raise RewardError(
                    f"reward {self._name}: {replica.url} answers with status {status}, which no further try"
                    f" can change; {fix}"
                )
            message = f"{address} answers with status {status}: {answer[:200]!r}"
            if kind == "refused":
                raise Refused(message)
            if kind == "temporary":
                # A sample can cause a 500. Other statuses, such as 429 and 503, mean that the service is
                # overloaded or down.
                raise Failure(message, searchable=status == 500)
            return read_answer(answer, len(samples), address)

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


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Failure) and not isinstance(error, Refused)


def read_answer(body: bytes, count: int, address: str) -> Outcome:
    """Return the scores in an answer for `count` items.

    Raises `Failure` for an answer that the protocol forbids.
    """
    try:
        answer = json.loads(body)
        scores, errors = answer["scores"], answer.get("errors", {})
        values = [math.nan if score is None else _number(score) for score in scores]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Failure(
            f'{address} must answer {{"scores": [...]}} with numbers; got {body[:80]!r} ({error})'
        ) from error
    if len(values) != count:
        raise Failure(f"{address} gave {len(values)} scores for {count} items")
    outcome = Outcome.of(values)
    given = errors if isinstance(errors, dict) else {}
    reasons = dict(outcome.reasons)
    for index in reasons:
        if str(index) in given:
            reasons[index] = f"{address} answers: {str(given[str(index)])[:200]!r}"
    return Outcome(outcome.values, reasons)


def _number(score: object) -> float:
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise TypeError(f"{str(score)[:40]!r} is no number")
    return float(score)
