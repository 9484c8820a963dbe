"""A reward service over HTTP: `type: remote` of `ppo.rewards`.

One request is a POST of JSON to a replica's url, with `Authorization: Bearer $RLHF_REWARD_TOKEN` where that
variable is set in the environment:

    {"items": [{"prompt": "...", "response": "...", "prompt_id": "...", "meta": {...}, "finished": true},
    ...]}

`prompt` and `response` are plain text without special tokens; `meta` has the other fields of the prompt's
row; `finished` is false if the length limit cut the response. With `send_tokens` each item also has
`prompt_ids` and `response_ids`, the tokens that the policy read and generated. With `needs_group` the items
of a request are all responses to one prompt in the batch, and no others. The answer is status 200 and one
score per item, in order:

    {"scores": [0.25, null, ...], "errors": {"1": "why item 1 has no score"}}

null (or a number that is not finite) is an item without a score; `errors` is optional. Any other status is a
failure of the whole request (`rewards.post`). A refused one is caused by an item, which is searched for
with smaller requests; a final one ends the step; a temporary one is retried.

    samples -> requests of `items_per_request` -> least busy replica -> scores
                 ^                                    | failure
                 +------- backoff with jitter --------+

A replica that has failed `breaker_failures` times in a row is not used for `breaker_seconds`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rlhf_core.config.rewards import RemoteReward
from rlhf_core.rewards.failures import PAUSE_SECONDS, Failure, Outcome, Refused, groups_of, score_with_retries
from rlhf_core.rewards.post import TOKEN_VARIABLE, Poster, request_threads, reward_token
from rlhf_core.types import RewardInput

_POLL_SECONDS = 0.1


@dataclass
class Replica:
    """One address of the service."""

    url: str
    active: int = 0
    """Number of requests that have no answer yet."""
    requests: int = 0
    """Number of requests so far."""
    failures: int = 0
    """Number of failures in a row."""
    unused_until: float = 0.0
    """Time of the monotonic clock before which it gets no request."""


class ReplicaPool:
    """Selects the least busy replica, with at most `concurrency` requests at a time each."""

    def __init__(self, source: RemoteReward) -> None:
        self._source = source
        self._replicas = list(map(Replica, source.urls))
        self._changed = threading.Condition()

    @contextmanager
    def least_busy(self, *, searching: bool = False) -> Iterator[str]:
        """Return the url of the replica with the fewest active requests, then the fewest so far, for one
        request.

        `Refused` does not count against the replica. Nor does, during the search for bad samples
        (`searching`), any failure that a sample may have caused. Raises `Failure` if no replica can be used
        for `timeout` + `breaker_seconds`.
        """
        replica = self._acquire()
        works = True
        try:
            yield replica.url
        except Failure as failure:
            works = isinstance(failure, Refused) or (searching and failure.searchable)
            raise
        finally:
            self._release(replica, works=works)

    def _acquire(self) -> Replica:
        patience = self._source.timeout + self._source.breaker_seconds
        deadline = time.monotonic() + patience
        with self._changed:
            while True:
                now = time.monotonic()
                usable = [replica for replica in self._replicas if replica.unused_until <= now]
                free = [replica for replica in usable if replica.active < self._source.concurrency]
                if free:
                    # By activity alone, the first url would get every request that finds all replicas idle.
                    chosen = min(free, key=lambda replica: (replica.active, replica.requests))
                    chosen.active += 1
                    chosen.requests += 1
                    return chosen
                if usable:
                    # Busy, but not broken: their requests end within their own time limit.
                    deadline = now + patience
                elif now >= deadline:
                    raise Failure(f"none of its {len(self._replicas)} replicas answers", searchable=False)
                # With a limit, because the time alone makes a broken replica usable again.
                self._changed.wait(_POLL_SECONDS)

    def _release(self, replica: Replica, *, works: bool) -> None:
        with self._changed:
            replica.active -= 1
            replica.failures += 1
            if works:
                replica.failures = 0
            # A request that was sent before the pause can still
            # succeed. It ends the pause, because the replica works.
            replica.unused_until = 0.0
            # One that answers nothing is the least busy one, and would get all requests.
            if replica.failures >= self._source.breaker_failures:
                replica.unused_until = time.monotonic() + self._source.breaker_seconds
            self._changed.notify_all()


class RemoteService:
    """Callable `Sequence[RewardInput] -> Outcome`. Call `close` at the end.

    The time of a batch is limited. Each request has `1 + retries` attempts. An attempt waits while the
    replicas are busy with other requests, at most `timeout` + `breaker_seconds` if none can be used, and at
    most `timeout` for each part of its answer.
    """

    def __init__(self, source: RemoteReward) -> None:
        self._source = source
        self._replicas = ReplicaPool(source)
        self._poster = Poster(
            f"reward {source.used_name}",
            source.urls,
            reward_token(),
            f"give its token by {TOKEN_VARIABLE}",
            "correct the path of the url",
        )

    def __call__(self, samples: Sequence[RewardInput]) -> Outcome:
        """Score samples.

        Raises `RewardError` if no retry can help: a wrong token or path.
        """
        if self._source.needs_group:
            parts = groups_of(samples)
        else:
            rows, size = range(len(samples)), self._source.items_per_request
            parts = [list(rows[start : start + size]) for start in range(0, len(samples), size)]
        batches = [[samples[row] for row in rows] for rows in parts]
        # As many as all replicas take together: further threads would only wait in `ReplicaPool`.
        with request_threads(self._source.concurrency * len(self._source.urls)) as threads:
            # `map` keeps the order of the parts, whichever answer comes first.
            return Outcome.of_groups(parts, list(threads.map(self._score, batches)))

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        self._poster.close()

    def _score(self, samples: Sequence[RewardInput]) -> Outcome:
        return score_with_retries(
            self._source.used_name,
            self._once,
            samples,
            self._source.retries + 1,
            pause=PAUSE_SECONDS,
            search=partial(self._once, searching=True),
        )

    def _once(self, samples: Sequence[RewardInput], *, searching: bool = False) -> Outcome:
        request = {"items": [self._item(sample) for sample in samples]}
        try:
            with self._replicas.least_busy(searching=searching) as url:
                body = self._poster.ask(url, request, self._source.timeout)
                return read_answer(body, len(samples), urlsplit(url).netloc)
        except Failure as failure:
            # Parts of a group would get other values.
            failure.searchable &= not self._source.needs_group
            raise

    def _item(self, sample: RewardInput) -> dict[str, Any]:
        item = {
            "prompt": sample.prompt,
            "response": sample.response,
            "prompt_id": sample.prompt_id,
            "meta": sample.meta,
            "finished": sample.finished,
        }
        if self._source.send_tokens:
            item |= {"prompt_ids": list(sample.prompt_ids), "response_ids": list(sample.response_ids)}
        return item


def read_answer(body: bytes, count: int, address: str) -> Outcome:
    """Return the scores in an answer for `count` items.

    Raises `Failure` for an answer that the protocol forbids.
    """
    try:
        answer = json.loads(body)
        scores, errors = answer["scores"], answer.get("errors", {})
        values = [math.nan if score is None else _number(score) for score in scores]
    # `json.loads` raises RecursionError for nested brackets, and `float` OverflowError for an integer
    # of 400 digits. The service is not trusted: neither may end the stage as an unknown error.
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
            # `!r`, because this text goes to logs and terminals, and a service could send control characters.
            reasons[index] = f"{address} answers: {str(given[str(index)])[:200]!r}"
    return Outcome(outcome.values, reasons)


def _number(score: object) -> float:
    # bool is an int in Python: a service that answers true and false would silently be read as 1 and 0.
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise TypeError(f"{str(score)[:40]!r} is no number")
    return float(score)
