"""What travels between the controller and the workers: plain records with numpy arrays, so Ray can share
them.

Axes: `T` response tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.ppo.samples import FloatArray


@dataclass(frozen=True)
class LogprobResult:
    """Log-probabilities of one rank's sequences."""

    logprobs: list[FloatArray]
    """(T,) each."""
    entropy: list[FloatArray] | None
    """(T,) each, where asked for."""


@dataclass(frozen=True)
class ParticipantSpec:
    """How an actor registers with the heartbeat monitor."""

    name: str
    """`critic+reward rank 0`, `engine 1`."""
    folder: Path
    """See `rlhf_core.system.heartbeat`."""
    timeouts: TimeoutsConfig


@dataclass(frozen=True)
class Usage:
    """Of one process since it started."""

    cpu_seconds: float
    peak_bytes: int
    """Largest resident set."""
