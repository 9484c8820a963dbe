"""Training ranks of one stage on one host: rank 0 is the stage's own process, the others are spawned beside it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from rlhf_core.errors import ConfigError, WorkerDied
from rlhf_core.training.distributed import Rank, free_port, join, leave


def resolve_device(wanted: str) -> str:
    """ "cuda" or "cpu"; `auto` takes CUDA where there is any."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch sees no CUDA device; use run.device=auto or cpu")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def run_ranks(work: Callable[..., Any], ranks: int, device: str, *args: Any, rank_zero: Any) -> Any:
    """Call `work(rank, *args, context)` on every rank and return what rank 0 returned.

    `context` is `rank_zero` on rank 0 and None elsewhere: only rank 0 tracks, commits and reports. `work` and `args`
    must be picklable. A rank that dies breaks the others' next collective, so nothing waits for it.
    """
    port = free_port()
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(
            target=_other_rank, args=(work, Rank(r, ranks, r, "127.0.0.1", port, device), args), daemon=True
        )
        for r in range(1, ranks)
    ]
    for process in others:
        process.start()
    try:
        join(Rank(0, ranks, 0, "127.0.0.1", port, device))
        result = work(Rank(0, ranks, 0, "127.0.0.1", port, device), *args, rank_zero)
        for r, process in enumerate(others, start=1):
            process.join(60)
            if process.exitcode != 0:
                raise WorkerDied(f"training rank {r} ended with {process.exitcode}; see the log of the stage")
        return result
    except RuntimeError as error:
        dead = [r for r, process in enumerate(others, start=1) if process.exitcode not in (None, 0)]
        if dead:
            raise WorkerDied(f"training rank {dead[0]} died; the stage continues from its last checkpoint") from error
        raise
    finally:
        leave()
        for process in others:
            process.kill()


def _other_rank(work: Callable[..., Any], rank: Rank, args: tuple[Any, ...]) -> None:
    join(rank)
    work(rank, *args, None)
    leave()
