"""The context of rank 0 if that is an actor: its calls run in the stage's own process.

    rank 0                                     stage's process
    context.metrics.flush()
      Mailbox.call(function)
      waits                           <-----   asks for the next request (`RankActor.next_request`)
      request                         ----->   ContextServer.execute calls the function
      returns or raises               <-----   asks for the next one, with the reply to this one

A request is a function that takes the `ContextServer`. Ray serializes it with the values it uses. Metrics,
progress, checkpoints and the stop request stay in the stage's process, which holds the fence and the
connections. Rank 0 needs no access to it: the stage's process only calls, and is never called.
"""

from __future__ import annotations

import logging
import pickle
import queue
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.errors import RLHFError, classified
from rlhf_core.system.processes import StopRequest
from rlhf_core.types import StageContext

T = TypeVar("T")

_FORMATTER = logging.Formatter()


@dataclass(frozen=True)
class CallRequest:
    """One call of rank 0."""

    function: Callable[[ContextServer], Any]
    """The function that is called in the stage's process."""
    needs_reply: bool = True


@dataclass(frozen=True)
class CallReply:
    """What the call returned or raised."""

    value: Any = None
    error: RLHFError | None = None


# A function of the module and no lambda: END has to be equal to itself after it was pickled.
def _end(_: ContextServer) -> None:
    """The server does not call it."""


END = CallRequest(_end, needs_reply=False)
"""The last request of rank 0."""


# -- in rank 0 --


class Mailbox:
    """Hands the calls of one thread to the stage's process."""

    def __init__(self) -> None:
        self._requests: queue.Queue[CallRequest] = queue.Queue()
        self._replies: queue.Queue[CallReply] = queue.Queue()
        self.stop = _RemoteStop(self)

    def call(self, function: Callable[[ContextServer], T]) -> T:
        """Call `function` in the stage's process. Returns and raises what it returns and raises there."""
        self._requests.put(CallRequest(function))
        # Without a limit: the stage's process ends this one when it ends itself.
        reply = self._replies.get()
        if reply.error is not None:
            raise reply.error
        value: T = reply.value
        return value

    def post(self, request: CallRequest) -> None:
        """Hand over a request without waiting for a reply; from any thread."""
        self._requests.put(request)

    def exchange(self, reply: CallReply | None, stop: bool, seconds: float) -> CallRequest | None:
        """Deliver the reply to the last request, and return the next request, or None after `seconds`.

        `stop`: the stage was asked to stop.
        """
        # Before the reply, with which the call of rank 0 returns: its loop looks at the request next.
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
            "progress": _Remote(self, "progress"),
        }
        return replace(context, **parts, stop=self.stop)


class _Remote:
    """A part of the context whose methods are called in the stage's process.

    Args:
        mailbox: Takes the calls.
        part: Name of the field of `StageContext`.
    """

    def __init__(self, mailbox: Mailbox, part: str) -> None:
        self._mailbox = mailbox
        self._part = part

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            # Special methods that Python and libraries look for, such as `__deepcopy__`.
            raise AttributeError(method)
        return partial(self._call, method)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        # Only the name of the part, because Ray serializes the function: the mailbox stays here.
        part = self._part
        return self._mailbox.call(
            lambda server: getattr(getattr(server.context, part), method)(*args, **kwargs)
        )


class _Writable:
    """Becomes `value` in the stage's process. Arrays that Ray transfers by themselves are read-only there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(self._value),)


class _RemoteMetrics(_Remote):
    def log_figure(self, name: str, figure: Any) -> None:
        # matplotlib changes the arrays of a figure when it draws it.
        writable = _Writable(figure)
        self._mailbox.call(lambda server: server.context.metrics.log_figure(name, writable))

    def log_file(self, path: Path, folder: str = "") -> None:
        # The file is on the disk of this host.
        name, content = path.name, path.read_bytes()
        self._mailbox.call(lambda server: server.log_file(name, content, folder))


class _RemoteStop(StopRequest):
    """The stop request of the stage, whose process alone gets the signal."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox

    def defer(self) -> None:
        self._mailbox.call(lambda server: server.context.stop.defer())


class LogForwarder(logging.Handler):
    """Sends the log of rank 0 to the stage's process, which shows warnings to the user."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self._mailbox = mailbox

    def emit(self, record: logging.LogRecord) -> None:
        # As text, because the traceback of a record cannot be pickled.
        name, level, text = record.name, record.levelno, _FORMATTER.format(record)
        self._mailbox.post(CallRequest(lambda server: server.log(name, level, text), needs_reply=False))


# -- in the stage's process --


def portable(context: StageContext) -> StageContext:
    """Return what a process on another host can use of `context`."""
    # These have threads, locks and connections, which cannot be pickled.
    parts: dict[str, Any] = dict.fromkeys(("checkpoints", "metrics", "progress", "monitor", "nodes"))
    return replace(context, **parts, stop=StopRequest())


class ContextServer:
    """Executes the calls of rank 0 in the stage's process.

    Args:
        context: The context of the stage; None if rank 0 gets none.
    """

    def __init__(self, context: StageContext | None) -> None:
        self._context = context

    @property
    def stop_requested(self) -> bool:
        """Whether the stage was asked to stop."""
        return self._context is not None and self._context.stop.requested

    @property
    def context(self) -> StageContext:
        assert self._context is not None
        return self._context

    def execute(self, request: CallRequest) -> CallReply | None:
        """Return the reply, if rank 0 waits for one."""
        try:
            reply = CallReply(request.function(self))
        except Exception as error:
            # Whatever it is: without a reply, rank 0 would wait until the stage is stuck.
            reply = CallReply(error=classified(error))
        return reply if request.needs_reply else None

    def log(self, name: str, level: int, text: str) -> None:
        """Log a line of rank 0."""
        logging.getLogger(name).log(level, "%s", text)

    def log_file(self, name: str, content: bytes, folder: str) -> None:
        """Log a file of rank 0."""
        # A folder of its own, so that the file keeps its name.
        temporary = Path(tempfile.mkdtemp(prefix="rlhf-log-"))
        try:
            (temporary / name).write_bytes(content)
            self.context.metrics.log_file(temporary / name, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
