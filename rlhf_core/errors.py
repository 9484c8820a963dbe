"""Every error that the pipeline raises on purpose.

    RLHFError                      exit code 3: a fault; the same command continues from the last checkpoint
    ├── InputError                 exit code 2: the user's configuration, data or model is wrong; not retried
    │   ├── ConfigError            a field of the YAML or an override
    │   ├── DataError              a data source or a row of it
    │   └── ModelError             a model or tokenizer that cannot be used
    ├── StageFailed                a stage's child process ended without a result
    ├── WorkerDied                 a Ray worker, engine or training rank is gone or did not answer in time
    ├── WeightSyncError            an engine's weights are not the trainer's
    ├── StoreError                 the store, or the disk below it, does not take or give what it should
    ├── CorruptArtifact            a file does not have the size or sha256 of its manifest
    ├── Superseded                 a later attempt holds this stage key; this one must not commit
    ├── GateFailed                 a model is too bad to go on with (accuracy, KL, empty answers); not retried
    ├── NonFiniteError             a loss, gradient or reward is NaN or Inf, three times in a row; not retried
    └── RewardError                a reward source failed or returned something unusable

All of them take one message, so they survive pickling through Ray and JSON through a child process
(`to_record`, `from_record`) with their class intact.
"""

from __future__ import annotations

EXIT_INPUT = 2
EXIT_FAULT = 3


class RLHFError(Exception):
    """Base class. `exit_code` is what the process that ends with it returns."""

    exit_code = EXIT_FAULT

    @property
    def message(self) -> str:
        """The sentence for the user."""
        return str(self.args[0]) if self.args else type(self).__name__


class InputError(RLHFError):
    """Something the user gave is wrong; trying again cannot help."""

    exit_code = EXIT_INPUT


class ConfigError(InputError):
    """A configuration field: the message has file, line, field, value, rule and a fix."""


class DataError(InputError):
    """A data source or a row: the message has the file, the line and the rule."""


class ModelError(InputError):
    """A model, tokenizer or chat template that cannot be used."""


class StageFailed(RLHFError):
    """A stage's child process died or gave no result."""


class WorkerDied(RLHFError):
    """A worker or engine is gone, or did not answer within its timeout."""


class WeightSyncError(RLHFError):
    """Version or checksum acknowledged by an engine differ from what was sent."""


class StoreError(RLHFError):
    """A bucket or a disk refuses, is full or does not answer; nothing that was whole before is lost."""


class CorruptArtifact(RLHFError):
    """Stored bytes do not match their manifest."""


class Superseded(RLHFError):
    """A newer attempt owns the stage key."""


class GateFailed(RLHFError):
    """A result is too bad to go on with; the same configuration would end here again."""


class NonFiniteError(RLHFError):
    """A number that must be finite is not; the same configuration would end here again."""


class RewardError(RLHFError):
    """A reward source raised, timed out or returned unusable values."""


_BY_NAME: dict[str, type[RLHFError]] = {
    cls.__name__: cls
    for cls in (
        RLHFError, InputError, ConfigError, DataError, ModelError, StageFailed, WorkerDied, WeightSyncError,
        StoreError, CorruptArtifact, Superseded, GateFailed, NonFiniteError, RewardError,
    )
}  # fmt: skip


def to_record(error: BaseException) -> dict[str, str]:
    """`{"type", "message"}` of any exception, for crossing a process border as JSON."""
    if isinstance(error, RLHFError):
        return {"type": type(error).__name__, "message": error.message}
    return {"type": "StageFailed", "message": f"{type(error).__name__}: {error}"}


def from_record(record: dict[str, str]) -> RLHFError:
    """The exception that `to_record` wrote; an unknown type becomes `StageFailed`."""
    return _BY_NAME.get(record.get("type", ""), StageFailed)(record.get("message", "no message"))
