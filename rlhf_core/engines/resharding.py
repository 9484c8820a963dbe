"""A checkpoint of one number of ranks, continued on another: DeepSpeed's universal format.

    shards of all ranks -> one file per parameter and state, whole -> each rank takes its part of it

Nothing sharded (ZeRO 0 in float32) needs no conversion.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

_RANKS = "ranks"


def note_ranks(folder: Path, ranks: int) -> None:
    """Into a checkpoint's folder: how many ranks wrote it."""
    (folder / _RANKS).write_text(f"{ranks}\n")


def noted_ranks(folder: Path) -> int:
    return int((folder / _RANKS).read_text())


def is_sharded(state: Path) -> bool:
    """True if each rank wrote its own part of the optimizer's state."""
    return any(state.glob("*zero_pp_rank_*_optim_states.pt"))


def convert(state: Path, out: Path) -> None:
    """DeepSpeed's `state` folder as a universal one at `out`, in this process: its pickles are then loaded
    under the allow-list of `distributed.join`.
    """
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(state),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ds_to_universal.main(options)


@contextlib.contextmanager
def loading_universal(engine: Any) -> Any:
    """While it lasts, the DeepSpeed engine reads universal checkpoints; mends what DeepSpeed 0.19 leaves
    wrong after it.
    """
    own = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
    # Under ZeRO-3 every group was given the first one's settings: norms would decay as matrices do.
    for group, settings in zip(engine.optimizer.param_groups, own, strict=True):
        group.update(settings)
    # ... and all of them share one count of steps, which AdamW then raises once for each; it lies on the CPU,
    # where a fused AdamW would not find it.
    for parameter, state in engine.optimizer.optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(parameter.device, copy=True)
