"""Which hosts the processes of PPO are on.

The training ranks fill the hosts in the order of `config.placement`: policy first. The engines use the
devices that are left, each inside one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.config.placement import PlacementPlan
from rlhf_core.planning.hardware import Hardware


@dataclass(frozen=True)
class Layout:
    """Hosts of the groups of training ranks and of the engines."""

    groups: tuple[tuple[int, ...], ...]
    """Numbers of the hosts of each group."""
    engines: tuple[int, ...]
    """Numbers of the hosts that have an engine."""


def arrange(ranks: Sequence[int], hardware: Hardware) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Return the hosts of each group of `ranks`, and the devices of each host that are left.

    Devices that the hardware does not have are on further hosts, so that a plan for too few devices also has
    times.
    """
    first, groups = 0, []
    for count in ranks:
        last = first + count - 1
        groups.append(tuple(range(first // hardware.per_host, last // hardware.per_host + 1)))
        first += count
    left = []
    for host in range(hardware.hosts):
        end = (host + 1) * hardware.per_host
        left.append(min(hardware.per_host, max(0, end - first)))
    return tuple(groups), left


def engine_hosts(count: int, tensor_parallel: int, left: Sequence[int]) -> tuple[int, ...] | None:
    """Return the hosts of `count` engines on the devices that are `left`, or None if there is no room.

    The policy is on the first hosts. The engines go to the first ones with room.
    """
    hosts = []
    for host, devices in enumerate(left):
        fitting = min(count, devices // tensor_parallel)
        if fitting:
            hosts.append(host)
        count -= fitting
    return tuple(hosts) if count == 0 else None


def layout(placement: PlacementPlan, hardware: Hardware) -> Layout | None:
    """Return the hosts of all processes, or None if an engine has no room inside one host."""
    groups, left = arrange([group.ranks for group in placement.groups], hardware)
    if placement.colocated:
        used = -(-placement.engines * placement.tensor_parallel // hardware.per_host)
        return Layout(groups, tuple(range(used)))
    engines = engine_hosts(placement.engines, placement.tensor_parallel, left)
    return None if engines is None else Layout(groups, engines)
