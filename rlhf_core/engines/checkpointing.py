"""Checkpoints of a training loop: DeepSpeed's state of every rank plus the loop's own, committed as one
folder.
"""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.system.stopping import StopRequest
from rlhf_core.types import Services

log = logging.getLogger(__name__)

_LOOP = "loop.json"


def save(
    engine: TrainingEngine,
    services: Services | None,
    work: Path,
    step: int,
    state: dict[str, Any],
    score: float | None = None,
) -> None:
    """A collective; rank 0, the one with `services`, commits. Metrics so far go out first, so none is lost.

    `score`: higher is better, None where nothing was measured. Raises StoreError if the disk is too small.
    """
    started = time.monotonic()
    folder = work / f"checkpoint-{step:08d}"
    if services is not None:
        services.checkpoints.prepare(step, folder, engine.checkpoint_bytes)
    heartbeat("checkpoint")
    dist.barrier()
    engine.save_checkpoint(folder)
    failpoint("checkpoint.written")
    dist.barrier()
    if services is not None:
        heartbeat("commit", stall_after=math.inf)  # an upload's every call has its own bound
        (folder / _LOOP).write_text(json.dumps({"step": step, **state}))
        services.metrics.flush()
        services.checkpoints.save(step, folder, score)
        services.metrics.log_metrics({"timing/checkpoint": time.monotonic() - started}, step)


def after_step(
    engine: TrainingEngine,
    services: Services | None,
    work: Path,
    step: int,
    *,
    every: int,
    total: int,
    state: dict[str, Any],
    score: float | None = None,
) -> None:
    """`save` at every `every`-th step but the last; where rank 0 was asked to stop, at once, and leave. A
    collective.
    """
    asked = torch.tensor(float(services is not None and services.stop.asked), device=engine.rank.torch_device)
    dist.all_reduce(asked)
    stop = bool(asked.item())
    if (step % every == 0 or stop) and step < total:
        save(engine, services, work, step, state, score)
    if stop and step < total:
        log.info("asked to stop: leaving after step %d", step)
        (services.stop if services is not None else StopRequest()).leave()


def stops_after_a_step(services: Services | None) -> AbstractContextManager[None]:
    """For a loop that calls `after_step`."""
    return nullcontext() if services is None else services.stop.deferred()


def restore(engine: TrainingEngine, services: Services | None) -> dict[str, Any] | None:
    """Load the newest whole checkpoint on every rank; its loop state (with `step`), or None for a fresh
    start.
    """
    found: list[Any] = [None]
    heartbeat("restore", stall_after=math.inf)  # rank 0 fetches, the others wait for it in a collective
    if services is not None:
        latest = services.checkpoints.latest()
        found = [None if latest is None else (latest[1], services.work / "converted")]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    folder, scratch = found[0]
    heartbeat("load checkpoint")
    engine.load_checkpoint(folder, scratch)
    state: dict[str, Any] = json.loads((folder / _LOOP).read_text())
    return state
