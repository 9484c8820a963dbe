"""Inputs for reward functions, and a call with the checks of a real run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.rewards.python_worker import as_floats
from rlhf_core.types import Numbers, RewardInput


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
        prompt_ids=tuple(prompt.encode()),
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
