"""One call over all ranks of a group: cut a list, send the shares, put the answers back in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.config.placement import Role
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.packing import plan_ranks
from rlhf_core.ppo.fleet import Fleet


class Spread:
    """`method` of a role's workers, running on (sequences, micro-batches) cut over its ranks."""

    def __init__(
        self,
        fleet: Fleet,
        ppo: PPOConfig,
        role: Role,
        method: str,
        sequences: Sequence[Any],
        before: tuple[Any, ...] = (),
        after: tuple[Any, ...] = (),
    ) -> None:
        """`sequences`: (prompt ids, response ids). `before`, `after`: the method's other arguments."""
        group = fleet.groups[role]
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        plan = plan_ranks(lengths, group.ranks, ppo.micro_batch_tokens, pack=ppo.packs)
        self._fleet = fleet
        self._what = f"{role}.{method}"
        self._shares = [[i for micro in micros for i in micro] for micros in plan]
        arguments = [
            (*before, [sequences[i] for i in share], renumber(micros), *after)
            for share, micros in zip(self._shares, plan, strict=True)
        ]
        self._references = group.submit_each(method, arguments)

    def gather(self, pick: Callable[[Any], Sequence[Any]] = lambda answer: answer) -> list[Any]:
        """Wait; `pick` takes from a rank's answer its list, in the order of the sequences it was sent."""
        results: dict[int, Any] = {}
        for share, answer in zip(self._shares, self._fleet.wait(self._references, self._what), strict=True):
            results.update(zip(share, pick(answer), strict=True))
        return [results[i] for i in range(len(results))]


def renumber(micros: Sequence[Sequence[int]], start: int = 0) -> list[list[int]]:
    """Indices into the concatenation of the micro-batches, the first one at `start`."""
    numbered = []
    for micro in micros:
        numbered.append(list(range(start, start + len(micro))))
        start += len(micro)
    return numbered
