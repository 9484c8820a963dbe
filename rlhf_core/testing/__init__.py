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

The other fakes are in modules of their own. `trainer`, `ranks` and `fleet` import torch.

    data       writes a small data artifact
    engines    a scripted vLLM engine
    trainer    a scripted training engine
    ranks      ranks and engines of the stages other than PPO, in this process
    fleet      the ranks and engines of PPO, in this process
    cluster    the nodes of a Ray cluster, and actors whose calls run in this process
    machine    a machine with other GPUs and packages than this one, and a clock that does not wait
    store      a store that fails or waits at chosen operations

The context managers `scripted_engines`, `scripted_trainers` and `scripted_ranks` replace classes of this
package until they end. The other fakes are arguments.
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
