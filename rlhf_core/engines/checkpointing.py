"""Checkpoints of a training loop: the DeepSpeed state of every rank and the state of the loop, committed as
one folder. Also the table of the batch whose optimizer step was skipped.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.system.processes import StopRequest
from rlhf_core.types import StageContext

T = TypeVar("T")

log = logging.getLogger(__name__)

_LOOP = "loop.json"


@contextmanager
def new_checkpoint(
    context: StageContext | None,
    scratch: Path,
    step: int,
    size: int,
    *,
    unsharded: int | None = None,
    own: int = 0,
) -> Iterator[Path]:
    """Prepare the local folder of a checkpoint, and commit it if the body fills it without an error.

    Args:
        context: Context of the process that commits; None on all other ranks, which only compute the
            path.
        scratch: Folder of the attempt, the same path on all hosts.
        step: Number of the last finished step.
        size: Bytes that the ranks write, approximately.
        unsharded: See `Checkpoints.prepare`.
        own: See `Checkpoints.prepare`.

    Raises:
        StoreError: The disk of a host has no space for its part, or the commit failed.
    """
    started = time.monotonic()
    folder = scratch / f"checkpoint-{step:08d}"
    if context is not None:
        context.checkpoints.prepare(step, folder, size, unsharded, own=own)
    yield folder
    if context is not None:
        # Before the commit: a later attempt continues after this step and does not log its metrics again.
        context.metrics.flush()
        context.checkpoints.save(step, folder)
        context.metrics.log_metrics({"timing/checkpoint": time.monotonic() - started}, step)


def save(
    engine: TrainingEngine,
    context: StageContext | None,
    scratch: Path,
    step: int,
    state: dict[str, Any],
) -> None:
    """Save a checkpoint of a loop with one engine. This is a collective operation.

    Args:
        engine: The model of the loop.
        context: Context of rank 0, which commits; None on all other ranks.
        scratch: Folder of the attempt, the same path on all hosts.
        step: Number of the last finished step.
        state: JSON values that `restore` returns.

    Raises:
        StoreError: The disk is too small.
    """
    size, unsharded = engine.checkpoint_bytes
    with new_checkpoint(context, scratch, step, size, unsharded=unsharded) as folder:
        heartbeat("checkpoint")
        dist.barrier()  # no rank writes before rank 0 has emptied the folder
        engine.save_checkpoint(folder)
        failpoint("checkpoint.written")
        # Rank 0 commits after the last rank has written.
        dist.barrier()
        if context is not None:
            heartbeat("commit", stall_after=math.inf)  # each request of an upload has its own timeout
            (folder / _LOOP).write_text(json.dumps({"step": step, **state}))


def after_step(
    engine: TrainingEngine,
    context: StageContext | None,
    scratch: Path,
    step: int,
    *,
    every: int,
    total: int,
    state: dict[str, Any],
) -> None:
    """Save a checkpoint if one is due, and leave the process if it was asked to stop. This is a collective
    operation.

    Args:
        engine, context, scratch, step, state: See `save`.
        every: Steps between checkpoints.
        total: Steps of the whole loop. The last step needs no checkpoint, unless the process leaves.
    """
    # Only rank 0 gets the signal; the sum informs all ranks.
    asked = torch.tensor(
        float(context is not None and context.stop.requested), device=engine.rank.torch_device
    )
    dist.all_reduce(asked)
    stop = bool(asked.item())
    if stop or (step % every == 0 and step < total):
        save(engine, context, scratch, step, state)
    if stop:
        log.info("asked to stop: leaving after step %d", step)
        (context.stop if context is not None else StopRequest()).exit()


def restore(engine: TrainingEngine, context: StageContext | None) -> dict[str, Any] | None:
    """Load the newest intact checkpoint on every rank. This is a collective operation.

    Returns the state of the loop with its `step`, or None if there is no checkpoint.
    """
    checkpoint: list[Any] = [None]
    heartbeat("restore", stall_after=math.inf)  # rank 0 downloads while the others wait in the broadcast
    if context is not None:
        latest = context.checkpoints.latest()
        if latest is not None:
            # Every folder has the same path on all hosts (decision 24).
            checkpoint = [(latest[1], context.scratch / "converted")]
    dist.broadcast_object_list(checkpoint, src=0)
    if checkpoint[0] is None:
        return None
    folder, scratch = checkpoint[0]
    heartbeat("load checkpoint")
    engine.load_checkpoint(folder, scratch)
    state: dict[str, Any] = json.loads((folder / _LOOP).read_text())
    return state


@contextmanager
def log_skipped_batch(
    engine: TrainingEngine,
    context: StageContext | None,
    step: int,
    batch: Sequence[T],
    row: Callable[[T], dict[str, Any]],
) -> Iterator[None]:
    """Log the batch as a table if its optimizer step, the body of this context, is skipped.

    Args:
        engine: The engine that makes the step.
        context: Context of rank 0; None on all other ranks, which log nothing.
        step: Number of the step, for the name of the table.
        batch: Samples of the step.
        row: Converts a sample to a row of the table.
    """
    try:
        yield
    finally:  # also where this step is the one that ends the training
        if engine.grad_nonfinite and context is not None:
            context.metrics.log_table(f"skipped/step_{step:06d}", [row(sample) for sample in batch])
