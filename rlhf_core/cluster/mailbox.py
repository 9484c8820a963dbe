"""The context of rank 0 if that is an actor: its calls run in the stage's own process.

    rank 0                                     stage's process
    context.metrics.flush()
      Mailbox.call("metrics.flush")
      waits                           <-----   asks for the next request (`RankActor.next_request`)
      request                         ----->   ContextServer.execute
      returns or raises               <-----   asks for the next one, with the reply to this one

Metrics, progress, checkpoints and the stop request stay in the stage's process, which holds the fence and the
connections. Rank 0 needs no access to it: the stage's process only calls, and is never called.
"""

from __future__ import annotations

import logging
import pickle
import queue
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlhf_core.errors import RLHFError, classified
from rlhf_core.system.stopping import StopRequest
from rlhf_core.types import StageContext

_FORMATTER = logging.Formatter()


@dataclass(frozen=True)
class CallRequest:
    """One call of rank 0."""

    method: str
    """Such as `metrics.log_metrics`."""
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    needs_reply: bool = True


@dataclass(frozen=True)
class CallReply:
    """What the call returned or raised."""

    value: Any = None
    error: RLHFError | None = None


END = CallRequest("end", needs_reply=False)
"""The last request of rank 0."""


# -- in rank 0 --


class Mailbox:
    """Hands the calls of one thread to the stage's process."""

    def __init__(self) -> None:
        self._requests: queue.Queue[CallRequest] = queue.Queue()
        self._replies: queue.Queue[CallReply] = queue.Queue()
        self.stop = _RemoteStop(self)

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        """Call `method` of the context in the stage's process. Raises what it raises there."""
        self._requests.put(CallRequest(method, args, named))
        reply = self._replies.get()
        if reply.error is not None:
            raise reply.error
        return reply.value

    def post(self, request: CallRequest) -> None:
        """Hand over a request without waiting for a reply; from any thread."""
        self._requests.put(request)

    def exchange(self, reply: CallReply | None, stop: bool, seconds: float) -> CallRequest | None:
        """Deliver the reply to the last request, and return the next request, or None after `seconds`.

        `stop`: the stage was asked to stop.
        """
        self.stop.requested = stop
        if reply is not None:
            self._replies.put(reply)
        try:
            return self._requests.get(timeout=seconds)
        except queue.Empty:
            return None

    def context(self, context: StageContext) -> StageContext:
        """Return `context`, from `portable`, with the parts that it had in the stage's process."""
        parts: dict[str, Any] = {
            "checkpoints": _Remote(self, "checkpoints"),
            "metrics": _RemoteMetrics(self, "metrics"),
        }
        return replace(context, **parts, progress=partial(self.call, "progress"), stop=self.stop)


class _Remote:
    """A part of the context, such as its metrics."""

    def __init__(self, mailbox: Mailbox, part: str) -> None:
        self._mailbox = mailbox
        self._part = part

    def __getattr__(self, method: str) -> Any:
        return partial(self._mailbox.call, f"{self._part}.{method}")


class _Writable:
    """Becomes `value` in the stage's process. Arrays that Ray transfers by themselves are read-only there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(self._value),)


class _RemoteMetrics(_Remote):
    def log_figure(self, name: str, figure: Any) -> None:
        # matplotlib changes the arrays of a figure when it draws it.
        self._mailbox.call("metrics.log_figure", name, _Writable(figure))

    def log_file(self, path: Path, folder: str = "") -> None:
        # The file is on the disk of this host.
        self._mailbox.call("log_file", path.name, path.read_bytes(), folder)


class _RemoteStop(StopRequest):
    """The stop request of the stage, whose process alone gets the signal."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._mailbox.call("defer_stop", True)
        try:
            yield
        finally:
            self._mailbox.call("defer_stop", False)


class LogForwarder(logging.Handler):
    """Sends the log of rank 0 to the stage's process, which shows warnings to the user."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox

    def emit(self, record: logging.LogRecord) -> None:
        values = (record.name, record.levelno, _FORMATTER.format(record))
        self._mailbox.post(CallRequest("log", values, needs_reply=False))


# -- in the stage's process --


def portable(context: StageContext) -> StageContext:
    """Return what a process on another host can use of `context`."""
    parts: dict[str, Any] = dict.fromkeys(("checkpoints", "metrics", "progress", "monitor", "nodes"))
    return replace(context, **parts, stop=StopRequest())


class ContextServer:
    """Executes the calls of rank 0 in the stage's process.

    Args:
        context: The context of the stage; None if rank 0 gets none.
    """

    def __init__(self, context: StageContext | None) -> None:
        self._context = context
        self._deferral = ExitStack()

    @property
    def stop_requested(self) -> bool:
        """Whether the stage was asked to stop."""
        return self._context is not None and self._context.stop.requested

    def execute(self, request: CallRequest) -> CallReply | None:
        """Return the reply, if rank 0 waits for one."""
        try:
            reply = CallReply(self._method(request.method)(*request.args, **request.named))
        except Exception as error:
            reply = CallReply(error=classified(error))
        return reply if request.needs_reply else None

    def _method(self, name: str) -> Any:
        own = {"log": _log, "log_file": self._log_file, "defer_stop": self._defer_stop}
        return own[name] if name in own else attrgetter(name)(self._context)

    def _log_file(self, name: str, content: bytes, folder: str) -> None:
        assert self._context is not None
        temporary = Path(tempfile.mkdtemp(prefix="rlhf-log-"))
        try:
            (temporary / name).write_bytes(content)
            self._context.metrics.log_file(temporary / name, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _defer_stop(self, deferred: bool) -> None:
        assert self._context is not None
        if deferred:
            self._deferral.enter_context(self._context.stop.deferred())
        else:
            self._deferral.close()


def _log(name: str, level: int, text: str) -> None:
    logging.getLogger(name).log(level, "%s", text)
