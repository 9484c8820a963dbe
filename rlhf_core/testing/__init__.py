"""Fakes for tests of your own rewards, stages and training loops. They need no GPU, Ray, vLLM or DeepSpeed.

Each fake is a subclass of the interface that it replaces, so that a type checker reports a difference.

A reward function, with the checks of a real run:

    from rlhf_core.testing import reward_input, run_reward

    samples = [reward_input("What is 2 + 2?", "4", meta={"answer": "4"})]
    assert run_reward(my_module.exact_match, samples) == [1.0]

A stage or a training loop:

    from rlhf_core.testing import RecordingMetrics, stage_context

    metrics = RecordingMetrics()
    context = stage_context(tmp_path, inputs={"data": data_folder}, metrics=metrics)
    result = my_stage.run(config, context)
    assert metrics.column("train/loss")[-1] < 0.1
    assert (context.output / "model" / "config.json").exists()

`rlhf_core.testing.data` writes a small data artifact. `rlhf_core.testing.engines` has a scripted vLLM engine,
`rlhf_core.testing.trainer` a scripted training engine, `rlhf_core.testing.ranks` ranks without processes, and
`rlhf_core.testing.fleet` the ranks and engines of PPO. They are separate modules, because the last three
import torch. `rlhf_core.testing.machine` has a machine with other GPUs and packages than this one.

`rlhf_core.storage.store.Store` on a local folder has the same commits, digests and fencing as one on S3.
`rlhf_core.testing.store` has one that fails or waits at chosen operations, and `rlhf_core.testing.clock` a
clock that does not wait.
"""

from rlhf_core.run.local_context import FolderCheckpoints, RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.testing.rewards import reward_input, run_reward

__all__ = [
    "FolderCheckpoints",
    "RecordingMetrics",
    "RecordingProgress",
    "reward_input",
    "run_reward",
    "stage_context",
]
