"""Ranks and engines that would be actors of Ray, run in this process. Ray is not started.

from rlhf_core.testing.engines import scripted_engines
from rlhf_core.testing.ranks import RayCall, scripted_ranks

with scripted_ranks() as calls, scripted_engines(respond):
    my_stage.run(config, context)  # with evaluate.ranks=2
assert calls[0] == RayCall("connect", 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from typing_extensions import override

from rlhf_core.cluster.ranks import RankGroup, RankLayout, folders_in
from rlhf_core.config.pipeline import TimeoutsConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.testing.trainer import single_rank
from rlhf_core.types import StageContext


@dataclass(frozen=True)
class RayCall:
    """Something that Ray was asked for."""

    what: str
    """`connect`, `disconnect`, or what runs: `training rank`, `engine`."""
    processes: int = 0
    """How many processes it is for. 0 for `disconnect`."""


class ScriptedRankGroup(RankGroup):
    """Runs the target of all ranks in this process, one after the other.

    Training ranks share their work by collective operations, so here a single rank does all of it, in a
    process group of its own. Engines get their number and their own share.

    Args:
        layout: The processes.
        limits: Not used.
        monitor: Not used.
    """

    def __init__(self, layout: RankLayout, limits: TimeoutsConfig, monitor: Monitor) -> None:
        # Not the constructor of the base class, which starts the actors.
        self._layout = layout

    @override
    def run(
        self, target: Callable[..., Any], args: tuple[Any, ...], context: StageContext | None
    ) -> list[Any]:
        """Run the target, and return the result of each rank.

        Args:
            target: Is called with a rank, `args`, and the context on rank 0.
            args: Further arguments. Folders among them are shared with the other hosts.
            context: Context of the stage.
        """
        if context is not None and context.nodes is not None:
            for folder in folders_in(args):
                context.nodes.share(folder)
        count, device = self._layout.ranks, self._layout.device
        if self._layout.process_group:
            with single_rank():
                return [target(Rank(device=device), *args, context)] * count
        results = []
        for number in range(count):
            rank = Rank(number, count, device=device)
            results.append(target(rank, *args, context if number == 0 else None))
        return results

    @override
    def end(self) -> None:
        """Do nothing: nothing was started."""


@contextmanager
def scripted_ranks(
    make_group: Callable[[RankLayout, TimeoutsConfig, Monitor], ScriptedRankGroup] = ScriptedRankGroup,
) -> Iterator[list[RayCall]]:
    """Run all actors of ranks and engines in this process. Yields the calls of Ray so far.

    Args:
        make_group: Makes each group of ranks or engines.
    """
    calls: list[RayCall] = []
    connected = False

    def connect(processes: int, *_settings: Any) -> None:
        nonlocal connected
        connected = True
        calls.append(RayCall("connect", processes))

    def shutdown() -> None:
        nonlocal connected
        connected = False
        calls.append(RayCall("disconnect"))

    def group(layout: RankLayout, limits: TimeoutsConfig, monitor: Monitor) -> ScriptedRankGroup:
        calls.append(RayCall(layout.label, layout.ranks))
        return make_group(layout, limits, monitor)

    # Names of `cluster.ranks`, which has imported the function from another module.
    with (
        mock.patch("rlhf_core.cluster.ranks.connect", connect),
        mock.patch("rlhf_core.cluster.ranks.RankGroup", group),
        mock.patch("ray.is_initialized", lambda: connected),
        mock.patch("ray.shutdown", shutdown),
    ):
        yield calls
