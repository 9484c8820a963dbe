"""Every error that the pipeline raises on purpose.

    RLHFError                      exit code 3: a fault; the same command continues from the last checkpoint
    ├── InputError                 exit code 2: the user's configuration, data or model is wrong; not retried
    │   ├── ConfigError            a field of the YAML or an override
    │   ├── DataError              a data source or a row of it
    │   ├── ModelError             a model or tokenizer that cannot be used
    │   └── StageHeld              another process of this machine is making the stage
    ├── InfrastructureError        a process, host, network or service failed; the stage is tried again
    │   ├── StageFailed            a stage's child process ended without a result
    │   │   └── StageTimedOut      it took longer than run.stage_timeout, over all its attempts; not retried
    │   │       └── BudgetSpent    the run has used its run.budget
    │   ├── WorkerDied             a Ray worker, engine or training rank is gone
    │   ├── WorkerStuck            one of them makes no progress
    │   ├── OutOfMemory            of a device or of the host; tried again once
    │   ├── WeightSyncError        an engine's weights are not the trainer's
    │   └── StoreError             a read or write of the store or its disk failed
    │       └── StoreUnavailable   a bucket that did not answer, or failed, for the whole time of retries
    ├── UnexpectedError            an unexpected exception that only a change of the code can prevent; not
    │                              retried
    ├── CorruptArtifact            a file does not have the size or sha256 of its manifest
    ├── Superseded                 a later attempt holds this stage key; this one must not commit
    ├── GateFailed                 a model misses a limit (accuracy, KL, empty answers); not retried
    │   └── DataDrifted            the data have drifted too far from those of the champion
    ├── NonFiniteError             a loss, gradient or reward is NaN or Inf, three times in a row; not retried
    ├── RewardError                a reward source failed or returned something unusable
    └── VotesNeeded                exit code 4: the next round needs votes of people; no failure

All of them take one message, so they survive pickling through Ray and JSON through a child process
(`to_record`, `from_record`) with their class intact. `classified` makes one of them of any exception, in the
process where it was raised: another process may not even be able to unpickle it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INPUT = 2
EXIT_FAULT = 3
EXIT_VOTES = 4


@contextmanager
def checking(what: str) -> Iterator[None]:
    """Convert unexpected exceptions in checks of user input to a ConfigError about `what`, with exit code 2.

    At this point nothing has started that the same command could continue.
    """
    try:
        yield
    except RLHFError:
        raise
    except Exception as error:
        # On one line, as every other problem of a configuration.
        words = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{what}: cannot be checked ({type(error).__name__}: {words}); correct it"
        ) from error


def guarded(what: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield `findings`. An exception that finding them raises becomes one more finding, about `what`."""
    try:
        # Around the iteration: a check is a generator, whose code runs only while its findings are taken.
        with checking(what):
            yield from findings
    except InputError as error:
        yield error


class RLHFError(Exception):
    """Base class. `exit_code` is what the process that ends with it returns."""

    exit_code = EXIT_FAULT

    @property
    def message(self) -> str:
        """The text for the user."""
        return str(self.args[0]) if self.args else type(self).__name__


class InputError(RLHFError):
    """An input of the user is wrong. It is not retried."""

    exit_code = EXIT_INPUT


Finding = InputError | str
"""Result of a check before the start: an error if the run would fail, or the text of a warning."""


class ConfigError(InputError):
    """A configuration field: the message has file, line, field, value, rule and a fix."""


class DataError(InputError):
    """A data source or a row: the message has the file, the line and the rule."""


class ModelError(InputError):
    """A model, tokenizer or chat template that cannot be used."""


class StageHeld(InputError):
    """Another process makes the same stage. Wait for it, or stop one of the two."""


class InfrastructureError(RLHFError):
    """A process, host, network or service failed. Another attempt may succeed."""


class StageFailed(InfrastructureError):
    """A stage's child process died or gave no result."""


class StageTimedOut(StageFailed):
    """A stage exceeded `run.stage_timeout`. The same command continues it, with the same time limit."""


class BudgetSpent(StageTimedOut):
    """A run has used its `run.budget`. The same command continues it with a larger one."""


class WorkerDied(InfrastructureError):
    """A worker, engine or training rank is gone."""


class WorkerStuck(InfrastructureError):
    """A worker, engine or training rank made no progress within its timeout: it is suspended, or waits for
    something that does not arrive.
    """


class OutOfMemory(InfrastructureError):
    """Memory of a device or of the host was exhausted.

    It is retried once, because another process may have used the memory.
    """


class WeightSyncError(InfrastructureError):
    """Version or checksum acknowledged by an engine differ from what was sent."""


class StoreError(InfrastructureError):
    """A bucket or a disk refuses a request, is full or does not answer. What was committed is not lost."""


class StoreUnavailable(StoreError):
    """A temporary failure of a bucket that lasted longer than its retries. No input of the user is wrong."""


class UnexpectedError(RLHFError):
    """A bug in this program, or in code that it was given. A retry would fail in the same way."""


class CorruptArtifact(RLHFError):
    """Stored bytes do not match their manifest."""


class Superseded(RLHFError):
    """A newer attempt owns the stage key."""


class GateFailed(RLHFError):
    """A result does not meet a limit. It would not with the same configuration again."""


class DataDrifted(GateFailed):
    """A measure of drift is above its limit `drift.stop`."""


class NonFiniteError(RLHFError):
    """A number that must be finite is not. The same configuration would fail here again."""


class RewardError(RLHFError):
    """A reward source raised an exception, timed out or returned unusable values."""


class VotesNeeded(RLHFError):
    """The next round needs votes of people. The same call goes on when they are recorded."""

    exit_code = EXIT_VOTES


def _with_subclasses(kind: type[RLHFError]) -> Iterator[type[RLHFError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)


# Made once, at the end of the tree: a subclass in another module would arrive in another process as
# `StageFailed`, which is retried.
_BY_NAME = {kind.__name__: kind for kind in _with_subclasses(RLHFError)}

_BUGS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that are bugs. Most others are failures of the system: OSError, MemoryError, and RuntimeError,
which torch, gloo and CUDA raise.
"""


_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory")
"""Messages of torch and CUDA, of torch on the CPU, and of the kernel, which have no class for this error."""


def classified(error: BaseException, where: str = "") -> RLHFError:
    """Return `error` if it is an RLHFError, else one with its class and message, and `where` before them."""
    if isinstance(error, RLHFError):
        return error
    # What is unknown is tried again: one retry costs less than a run that ends (decision 10).
    kind = UnexpectedError if isinstance(error, _BUGS) else InfrastructureError
    # By the text: the class of CUDA's error is in torch, which processes without a model do not import, and
    # on the CPU torch raises a plain RuntimeError.
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        kind = OutOfMemory
    return kind(f"{where}: {type(error).__name__}: {error}" if where else f"{type(error).__name__}: {error}")


@contextmanager
def classifying(where: str) -> Iterator[None]:
    """Raise `classified(error, where)` for any error of the body."""
    try:
        yield
    except Exception as error:
        raise classified(error, where) from error


def to_record(error: BaseException) -> dict[str, str]:
    """Return `{"type", "message"}` of any exception, to be sent to another process as JSON."""
    ours = classified(error)
    return {"type": type(ours).__name__, "message": ours.message}


def from_record(record: dict[str, str]) -> RLHFError:
    """Return the exception that `to_record` wrote. An unknown type becomes `StageFailed`."""
    return _BY_NAME.get(record.get("type", ""), StageFailed)(record.get("message", "no message"))
