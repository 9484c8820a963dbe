"""Which hosts the processes of PPO are on, as `ppo.fleet.placement` assigns them.

Devices are taken in order, host by host: first by the policy's ranks, then by the engines, so that weights
stay inside a host where that is possible, then by the other groups. Engines with several GPUs are inside one
host, on the devices that the ranks leave. Colocated engines are on those of the ranks.
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


def first_devices(ranks: Sequence[int], engines: int, tensor_parallel: int) -> list[int]:
    """Return the number of the first device of each group of `ranks`, the first of which is the policy's."""
    first_of_groups, first = [], 0
    for count in ranks:
        first_of_groups.append(first)
        first += count
        if len(first_of_groups) == 1 and tensor_parallel == 1:
            first += engines
    return first_of_groups


def hosts_of(first: int, count: int, hardware: Hardware) -> tuple[int, ...]:
    """Return the numbers of the hosts of `count` devices.

    Devices that the hardware does not have are on further hosts, so that a plan for too few devices also has
    times.
    """
    return tuple(range(first // hardware.per_host, (first + count - 1) // hardware.per_host + 1))


def arrange(ranks: Sequence[int], engines: int, tensor_parallel: int, hardware: Hardware) -> Layout | None:
    """Return the hosts of all processes, or None if an engine has no room inside one host.

    Args:
        ranks: Number of ranks of each group, the policy's first.
        engines: Number of engines with devices of their own.
        tensor_parallel: GPUs of each engine.
        hardware: The hosts.
    """
    starts = first_devices(ranks, engines, tensor_parallel)
    groups = tuple(hosts_of(first, count, hardware) for first, count in zip(starts, ranks, strict=True))
    if engines == 0:
        return Layout(groups, ())
    if tensor_parallel == 1:
        return Layout(groups, hosts_of(ranks[0], engines, hardware))
    hosts, missing = [], engines
    for host in range(hardware.hosts):
        # Devices of this host that the ranks, which take the first ones, leave.
        left = min(hardware.per_host, max(0, (host + 1) * hardware.per_host - sum(ranks)))
        fitting = min(missing, left // tensor_parallel)
        if fitting:
            hosts.append(host)
        missing -= fitting
    return Layout(groups, tuple(hosts)) if missing == 0 else None


def layout(placement: PlacementPlan, hardware: Hardware) -> Layout | None:
    """Return the hosts of all processes, or None if an engine has no room inside one host."""
    ranks = [group.ranks for group in placement.groups]
    if not placement.colocated:
        return arrange(ranks, placement.engines, placement.tensor_parallel, hardware)
    ranks_only = arrange(ranks, 0, 1, hardware)
    assert ranks_only is not None, "without engines there is room"
    hosts, missing = [], placement.engines
    for host, fitting in enumerate(colocated_engines(placement.ranks, placement.tensor_parallel, hardware)):
        if missing and fitting:
            hosts.append(host)
        missing -= min(missing, fitting)
    return Layout(ranks_only.groups, tuple(hosts)) if missing == 0 else None


def colocated_engines(ranks: int, tensor_parallel: int, hardware: Hardware) -> list[int]:
    """Return for each host the number of engines for which it has enough of the `ranks`.

    Like `hosts_of`, it has further hosts for ranks without a device.
    """
    per_host = hardware.per_host
    return [min(per_host, ranks - first) // tensor_parallel for first in range(0, ranks, per_host)]
