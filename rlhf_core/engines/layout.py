"""The layout of rows, which is the same on all ranks. Rows are packed if the models of all ranks support it."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.config.training import Packing
from rlhf_core.engines.distributed import Rank

log = logging.getLogger(__name__)


def agreed(model: Any, pack: Packing, rank: Rank, field: str) -> bool:
    """Return whether all ranks pack. This is a collective operation.

    The result is based on `model.packs` of each rank (see `models.selftest`). `field` is the configuration
    field of `pack`, for the log.
    """
    votes = torch.tensor(int(model.packs), device=rank.torch_device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    packs = bool(votes.item())
    if rank.rank == 0 and pack is not False:
        tell(packs, type(model.lm).__name__, field)
    return packs


def tell(packs: bool, models: str, field: str) -> None:
    """Log the selected layout."""
    if packs:
        log.info("%s: rows are packed; sequences of %s do not influence each other", field, models)
    else:
        log.warning(
            "%s: rows are padded, because packed sequences of %s would influence each other", field, models
        )
