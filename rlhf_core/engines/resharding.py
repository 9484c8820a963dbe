"""Continue a checkpoint on another number of ranks, through DeepSpeed's universal format.

    shards of all ranks -> one file per parameter and state -> each rank reads its own part

A checkpoint without shards (ZeRO 0 in float32) needs no conversion.
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
    """Write the number of ranks to the folder of a checkpoint."""
    (folder / _RANKS).write_text(f"{ranks}\n")


def noted_ranks(folder: Path) -> int:
    """Return the number of ranks that saved a checkpoint."""
    return int((folder / _RANKS).read_text())


def is_sharded(state: Path) -> bool:
    """Return whether each rank saved its own part of the optimizer's state."""
    return any(state.glob("*zero_pp_rank_*_optim_states.pt"))


def is_first(scratch: Path) -> bool:
    """Create the folder `scratch`; return False if another rank that shares it has."""
    try:
        scratch.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def convert(state: Path, target: Path) -> None:
    """Convert DeepSpeed's folder `state` to a universal one at `target`.

    It runs in this process and not as DeepSpeed's script, so that the allow-list of `distributed.join`
    applies to its pickles.
    """
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(state),
        output_folder=str(target),
        # With more, DeepSpeed starts processes for the work.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # The version of the format, which DeepSpeed's own checkpoints lack and the conversion requires.
        inject_missing_state=True,
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        ds_to_universal.main(options)


@contextlib.contextmanager
def loading_universal(engine: Any) -> Any:
    """Let the DeepSpeed engine read universal checkpoints in this context.

    Afterwards, correct the parameter groups and step counts, which DeepSpeed 0.19 restores wrongly.
    """
    own_settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
    # Under ZeRO-3 every group has got the settings of the first one, so that norms would have weight decay.
    for group, settings in zip(engine.optimizer.param_groups, own_settings, strict=True):
        group.update(settings)
    # All parameters share one step count, which AdamW would increment once per parameter. It is on the CPU,
    # which a fused AdamW does not support.
    for parameter, state in engine.optimizer.optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(parameter.device, copy=True)
