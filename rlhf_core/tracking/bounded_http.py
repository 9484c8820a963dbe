"""HTTP requests for MLflow's client with a limit on their total time and on the size of the answer.

The library requests only limits the time between two reads. A server could block a request forever by sending
one byte at a time, endless headers, or `Retry-After: 3600`. An endless body could use all memory.
"""

from __future__ import annotations

import time
from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException, Timeout

from rlhf_core.system.waiting import within

ANSWER_BYTES = 64 * 2**20
"""Maximum size of an answer. 200 versions of a model with all their tags have less than 1 MB."""
UPLOAD_BYTES_PER_SECOND = 100_000
"""Minimum transfer rate for uploads."""
_DEFAULT_SECONDS = 10.0
_CHUNK = 2**16
"""Bytes of the body that are read at once."""


class BoundedAdapter(HTTPAdapter):
    """Adapter for `Session.mount` that limits the total time of a request and the size of its answer.

    The time limit is the timeout of one attempt times the number of attempts, plus the time for the request's
    body. `Retry-After` is ignored. Raises Timeout of requests, or RequestException if the answer is too
    large.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_retries = self.max_retries.new(respect_retry_after_header=False)

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, *args: Any, **kwargs: Any
    ) -> Response:
        seconds = self._seconds(request, timeout)
        # After `within` has given up: its error says that the time was up.
        end = time.monotonic() + seconds + 1
        send = super().send

        def call() -> Response:
            response = send(request, stream, timeout, *args, **kwargs)
            if not stream:
                # Otherwise `Response.content` would read the body later and without limits.
                response._content = _read(response, end)
                response._content_consumed = True
            return response

        try:
            # requests has no limit for a whole call. Another thread
            # makes it, and is left behind if it takes longer.
            return within(seconds, call)
        except TimeoutError as error:
            raise Timeout(f"no whole answer within {seconds:.0f} s") from error

    def _seconds(self, request: PreparedRequest, timeout: Any) -> float:
        each = max(timeout) if isinstance(timeout, tuple) else timeout or _DEFAULT_SECONDS
        size = int(request.headers.get("Content-Length") or 0)
        return float(each) * (1 + int(self.max_retries.total or 0)) + size / UPLOAD_BYTES_PER_SECOND


def _read(response: Response, end: float) -> bytes:
    """Return the body. It is not read on after the time `end`, when nobody waits for it."""
    content = bytearray()
    # The size counts after decompression: a megabyte of gzip can be a gigabyte of text.
    for part in response.raw.stream(_CHUNK, decode_content=True):
        content += part
        if len(content) > ANSWER_BYTES or time.monotonic() > end:
            response.close()
            raise RequestException(f"the answer is larger than {ANSWER_BYTES} bytes")
    response.raw.release_conn()
    return bytes(content)
