"""Which hosts the processes of PPO are on, as `ppo.fleet.placement` assigns them.

Devices are taken in order, host by host: first by the policy's ranks, then by the engines, so that weights
stay inside a host where that is possible, then by the other groups. Engines with several GPUs are inside one
host, on the devices that the ranks leave. Colocated engines are on those of the ranks.
"""

from __future__ import annotations

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


def layout(placement: PlacementPlan, hardware: Hardware) -> Layout | None:
    """Return the hosts of all processes, or None if an engine has no room inside one host."""
    starts = zip(first_devices(placement), placement.groups, strict=True)
    groups = tuple(hosts_of(first, group.ranks, hardware) for first, group in starts)
    if placement.tensor_parallel == 1 and not placement.colocated:
        return Layout(groups, hosts_of(placement.groups[0].ranks, placement.engines, hardware))
    hosts, missing = [], placement.engines
    for host, fitting in enumerate(room_for_engines(placement, hardware)):
        if missing and fitting:
            hosts.append(host)
        missing -= min(missing, fitting)
    return Layout(groups, tuple(hosts)) if missing == 0 else None


def first_devices(placement: PlacementPlan) -> list[int]:
    """Return the number of the first device of each group. The policy's group is the first one."""
    first_of_groups, first = [], 0
    for group in placement.groups:
        first_of_groups.append(first)
        first += group.ranks
        if len(first_of_groups) == 1 and placement.tensor_parallel == 1 and not placement.colocated:
            first += placement.engines
    return first_of_groups


def room_for_engines(placement: PlacementPlan, hardware: Hardware) -> list[int]:
    """Return for each host the number of engines that fit inside it: on the devices of the ranks if they are
    colocated, else on those that the ranks, which take the first ones, leave.
    """
    ranks, ways, per_host = placement.ranks, placement.tensor_parallel, hardware.per_host
    if placement.colocated:
        # Like `hosts_of`, with further hosts for ranks without a device.
        return [min(per_host, ranks - first) // ways for first in range(0, ranks, per_host)]
    left = (min(per_host, max(0, (host + 1) * per_host - ranks)) for host in range(hardware.hosts))
    return [devices // ways for devices in left]


def hosts_of(first: int, count: int, hardware: Hardware) -> tuple[int, ...]:
    """Return the numbers of the hosts of `count` devices.

    Devices that the hardware does not have are on further hosts, so that a plan for too few devices also has
    times.
    """
    return tuple(range(first // hardware.per_host, (first + count - 1) // hardware.per_host + 1))
