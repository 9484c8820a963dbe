"""Optimizer states of DeepSpeed in pinned host memory while another process uses the device.

DeepSpeed moves them itself, with these limits: under ZeRO-0 nothing; under ZeRO-3 the float32 weights only
for its own FusedAdam, which is compiled on first use, so that they stay on the device here. The weights in
the precision of the model stay under every stage, because a sync and a gather need them there.

    ZeRO       moved                                          stays
    1, 2       float32 weights, two moments, gradients        weights
    3          two moments, gradients                         shards of weights, float32 weights
"""

from __future__ import annotations

from typing import Any


def offload_states(engine: Any) -> None:
    """Move the states of a trained DeepSpeed engine to host memory, until `reload_states`."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    include = [State.lp_grads, State.contiguous_grad_buffer]
    if engine.zero_optimization_partition_weights():
        offload_optimizer_states(engine.optimizer.optimizer, "cpu", pin_memory=True)
    else:
        include += [State.hp_params, State.optim_states]
    engine.offload_states(include=include)


def reload_states(engine: Any) -> None:
    """Move the states back to the device."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    engine.reload_states()
    if engine.zero_optimization_partition_weights():
        device = get_accelerator().current_device_name()
        # Without `non_blocking`, so it returns when all copies have ended.
        reload_optimizer_states(engine.optimizer.optimizer, device)
