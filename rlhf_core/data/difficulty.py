"""Prompts by the pass rate in their rows: `ppo.difficulty`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from rlhf_core.config.ppo_sections import DifficultyConfig
from rlhf_core.data.dataset import Rows
from rlhf_core.errors import DataError
from rlhf_core.types import PromptExample

log = logging.getLogger(__name__)


def by_difficulty(prompts: Sequence[PromptExample], settings: DifficultyConfig) -> Rows[PromptExample]:
    """Return the prompts whose pass rate is within the limits, in the order that `settings` names. They are
    taken from `prompts` when they are asked for.

    Raises DataError if there are none.
    """
    kept = []
    unknown = 0
    for number, prompt in enumerate(prompts):
        rate = prompt.meta.get(settings.field)
        # `bool` is a subclass of `int`: a field such as `solved: true` is no pass rate of 1.
        if isinstance(rate, bool) or not isinstance(rate, int | float) or math.isnan(rate):
            unknown += 1
        elif settings.min <= rate <= settings.max:
            kept.append((rate, number))
    limits = f"{settings.field} from {settings.min:g} to {settings.max:g}"
    if not kept:
        raise DataError(
            f"ppo.difficulty: none of {len(prompts)} training prompts has {limits} ({unknown} have no number"
            f" in the field {settings.field}); correct the limits, or write the field with rlhf pass-rates"
        )
    log.info(
        "ppo.difficulty: %d of %d training prompts have %s; %d have no number in this field",
        len(kept), len(prompts), limits, unknown,
    )  # fmt: skip
    if settings.order == "easy_first":
        kept.sort(key=lambda rated: -rated[0])
    return Rows(len(kept), lambda index: prompts[kept[index][1]])
