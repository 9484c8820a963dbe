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

The other fakes are in modules of their own. `trainer` and `ranks` import torch.

    data       writes a small data artifact
    engines    a scripted vLLM engine
    trainer    a scripted training engine
    ranks      ranks and engines of the stages other than PPO, in this process

The context managers `scripted_engines`, `scripted_trainers` and `scripted_ranks` replace classes of this
package until they end. The other fakes are arguments.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.rewards.python_worker import as_floats
from rlhf_core.run.local_context import FolderCheckpoints, RecordingMetrics, RecordingProgress, stage_context
from rlhf_core.types import Numbers, RewardInput

__all__ = [
    "FolderCheckpoints",
    "RecordingMetrics",
    "RecordingProgress",
    "reward_input",
    "run_reward",
    "stage_context",
]


def reward_input(
    prompt: str,
    response: str,
    *,
    finished: bool = True,
    meta: Mapping[str, Any] | None = None,
    prompt_id: str = "",
) -> RewardInput:
    """Return what a reward source gets for one response.

    The token ids are the UTF-8 bytes of the texts.

    Args:
        prompt: Text of the prompt.
        response: Text of the response.
        finished: False for a response that was cut at the length limit.
        meta: Further fields of the data row, for example `answer`.
        prompt_id: Id of the prompt. The default is the text of the prompt.
    """
    return RewardInput(
        prompt_id=prompt_id or prompt,
        prompt=prompt,
        response=response,
        prompt_ids=Numbers.of(list(prompt.encode())),
        response_ids=Numbers.of(list(response.encode())),
        finished=finished,
        meta=dict(meta or {}),
    )


def run_reward(function: Callable[[list[RewardInput]], Any], samples: Sequence[RewardInput]) -> list[float]:
    """Call a reward function and check its result as a reward of type `python` does.

    Unlike a real run, the function is called in this process and without a time limit.

    Raises:
        ValueError: The function did not return one finite number for each sample.
    """
    values = as_floats(function(list(samples)), len(samples))
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"it returned {value} for response {index}, but a finite number is needed")
    return values
