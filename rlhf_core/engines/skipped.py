"""What becomes of the batch of an optimizer step that was skipped: a table of the tracker, for whoever asks
why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.types import Services

T = TypeVar("T")


@contextmanager
def batch_kept(
    engine: TrainingEngine,
    services: Services | None,
    step: int,
    batch: Sequence[T],
    row: Callable[[T], dict[str, Any]],
) -> Iterator[None]:
    """Around the optimizer step of `batch`, also where it ends the training. `services`: rank 0's; None
    elsewhere.
    """
    try:
        yield
    finally:
        if engine.stumbled and services is not None:
            services.metrics.log_table(f"skipped/step_{step:06d}", [row(one) for one in batch])
