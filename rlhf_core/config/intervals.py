"""PPO's default steps between evaluations and between checkpoints."""

from __future__ import annotations

import math


def default_evaluation_interval(steps: int, sync_every: int) -> int:
    """Return the steps between evaluations: a tenth of the `steps` of the run, rounded up to a multiple of
    `sync_every` (`ppo.sync_every`). Above 10 it is a multiple of such a multiple of 5 or more, so that
    checkpoints can be in line.
    """
    every = math.ceil(max(1, steps // 10) / sync_every) * sync_every
    unit = math.ceil(5 / sync_every) * sync_every
    return every - every % unit if every > 10 and every >= unit else every


def checkpoint_interval(chosen: int | None, evaluations: int | None, sync_every: int) -> int:
    """Return the steps between checkpoints: `ppo.checkpoint_every` if it was `chosen`, or the default for the
    steps between evaluations (None: no evaluations).

    The default is 10, or the multiple of `evaluations` that is nearest to it. If evaluations are rarer, it is
    a divisor from 5 to 20 if there is one. It is rounded up to a multiple of `sync_every` (`ppo.sync_every`).
    """
    if chosen is not None:
        return chosen
    wanted = math.ceil(10 / sync_every) * sync_every
    if evaluations is None:
        return wanted
    evaluations = math.lcm(evaluations, sync_every)
    if evaluations <= wanted:
        return evaluations * round(wanted / evaluations)
    near = [steps for steps in range(5, 21) if evaluations % steps == 0 and steps % sync_every == 0]
    return min(near, key=lambda steps: abs(steps - wanted), default=wanted)
