"""Memory, arithmetic and bandwidth of devices, and the links between hosts: those of `rlhf plan --gpus`, or
those of this machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf_core.errors import ConfigError
from rlhf_core.system.machine import machine

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator, with the figures of its data sheet for dense bfloat16."""

    name: str
    memory: float
    """Bytes that the driver reports as free on an empty device."""
    flops: float
    """bfloat16 operations per second. A multiply-add counts as two."""
    bandwidth: float
    """Bytes per second from its own memory."""
    link: float
    """Bytes per second to another device, over NVLink, or over PCIe without NVLink."""
    pattern: str = ""
    """Regular expression for its whole name in the driver. Devices with similar names have other figures: an
    H100 NVL has 94 GB, a GH200 96 GB.
    """

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are cores, which share one memory."""
        return self.name == "CPU"

    @property
    def kind(self) -> str:
        """Its name in torch: `cpu` or `cuda`."""
        return "cpu" if self.is_cpu else "cuda"


@dataclass(frozen=True)
class Network:
    """Links of one host to the other hosts."""

    adapters: int
    """Network adapters of the host. A process uses the one next to its device."""
    rate: float
    """Bytes per second of one adapter, in each direction."""

    @property
    def total(self) -> float:
        """Bytes per second of all adapters of a host."""
        return self.adapters * self.rate

    def __str__(self) -> str:
        rate = f"{8 * self.rate / 1e9:g} Gbit/s"
        return rate if self.adapters == 1 else f"{self.adapters} x {rate}"


@dataclass(frozen=True)
class Hardware:
    """Equal devices of one host, or of equal hosts."""

    count: int
    """Devices of all hosts."""
    device: Device
    hosts: int = 1
    network: Network | None = None
    """Network between the hosts; None with one host."""
    host_memory: float | None = None
    """Bytes of a host's own memory; None if it is unknown."""

    @property
    def per_host(self) -> int:
        return self.count // self.hosts

    def __str__(self) -> str:
        if self.device.is_cpu:
            return f"{self.count} CPU cores"
        devices = f"{self.per_host} x {self.device.name}"
        if self.hosts == 1:
            return devices
        return f"{self.hosts} hosts of {devices}, {self.network} between them"


# `link`: NVLink in one direction, half of what data sheets state (A100 600 GB/s, H100 and H200 900 GB/s).
_DEVICES = (
    Device("A100-40G", 39.4 * GIB, 312e12, 1.555e12, 300e9, r"NVIDIA A100-\w+-40GB"),
    Device("A100-80G", 79.1 * GIB, 312e12, 2.039e12, 300e9, r"NVIDIA A100(-\w+-80GB| 80GB PCIe)"),
    Device("H100-80G", 79.1 * GIB, 989e12, 3.35e12, 450e9, "NVIDIA H100 80GB HBM3"),
    Device("H200-141G", 139.7 * GIB, 989e12, 4.8e12, 450e9, "NVIDIA H200"),
    Device("L40S-48G", 44.4 * GIB, 362e12, 0.864e12, 32e9, "NVIDIA L40S"),
    Device("RTX4090-24G", 23.5 * GIB, 165e12, 1.008e12, 25e9, "NVIDIA GeForce RTX 4090"),
)


def parse_gpus(text: str, link: str | None = None, host_memory_gib: float | None = None) -> Hardware:
    """Parse `2x8xH100-80G` (hosts, devices of each), `8xH100-80G` or `H100-80G`, in upper or lower case.

    Raises ConfigError with the known names, for several hosts without `link` (see `parse_link`), and for a
    memory of a host that is negative or not finite.
    """
    times = r"(?:([0-9]{1,6})\s*[xX*]\s*)?"
    match = re.fullmatch(rf"{times}{times}([\w-]+)", text.strip())
    matches: list[Device] = []
    numbers: list[int] = []
    if match is not None:
        matches = _devices_named(match[3])
        numbers = [int(number) for number in (match[1], match[2]) if number]
    if len(matches) != 1 or 0 in numbers:
        raise ConfigError(
            "--gpus: must be a count and a device, such as 8xA100-80G, or hosts, devices of each and the"
            f" device, such as 2x8xH100-80G; got {text!r}; known: {', '.join(each.name for each in _DEVICES)}"
        )
    # A count that is left out is 1.
    hosts, each = [1, 1, *numbers][-2:]
    if hosts > 1 and link is None:
        raise ConfigError(
            f"--link: --gpus {text} has several hosts; say how fast each sends to the others, such as"
            " 400gbit, or 8x400gbit for eight network adapters"
        )
    if host_memory_gib is not None and not 0 <= host_memory_gib < math.inf:
        raise ConfigError(f"--host-memory: must be a number of GiB, 0 or more; got {host_memory_gib:g}")
    memory = None if host_memory_gib is None else host_memory_gib * GIB
    network = None
    if link is not None and hosts > 1:
        network = parse_link(link)
    return Hardware(hosts * each, matches[0], hosts, network, memory)


def _devices_named(name: str) -> list[Device]:
    """Return the devices of this name. It may lack the memory, as `H100`."""
    return [each for each in _DEVICES if name.upper() in (each.name.upper(), each.name.split("-")[0])]


def parse_link(text: str) -> Network:
    """Parse `400gbit` or `8x400gbit`: network adapters of a host, and bits per second of each."""
    pattern = r"(?:([0-9]{1,3})\s*[x*]\s*)?([0-9]{0,7}\.?[0-9]{1,7})\s*(gbit|mbit)(?:/s)?"
    match = re.fullmatch(pattern, text.strip().lower())
    if match is None or not float(match[1] or 1) or not float(match[2]):
        raise ConfigError(
            f"--link: must be the speed of a host's network, such as 400gbit, 8x400gbit or 200mbit; got"
            f" {text!r}"
        )
    unit = {"gbit": 1e9, "mbit": 1e6}[match[3]]
    return Network(int(match[1] or 1), float(match[2]) * unit / 8)


def visible_hardware() -> Hardware | None:
    """Return the visible GPUs of this machine, or None without GPUs and for unknown or different ones."""
    count = machine().visible_gpus()
    device = _device_of(machine().gpu_names())
    if not count or device is None:
        return None
    return Hardware(count, device)


def cluster_hardware(hosts: Sequence[tuple[int, Sequence[str]]]) -> Hardware | None:
    """Return the GPUs of a cluster, or None without GPUs and for unknown or different ones.

    Hosts with different numbers of GPUs count as one host. The network between hosts is not known.

    Args:
        hosts: For each host, the number of its GPUs that Ray uses, and the names of all its GPUs.
    """
    counts: list[int] = []
    names: list[str] = []
    for count, names_of_host in hosts:
        if count:
            counts.append(count)
            # Without names, the kind is unknown, and so is that of the whole cluster.
            names += names_of_host or ("unknown",)
    device = _device_of(names)
    if device is None:
        return None
    return Hardware(sum(counts), device, len(counts) if len(set(counts)) == 1 else 1)


def _device_of(names: Iterable[str]) -> Device | None:
    """Return the device that all these GPUs are."""
    # A name that is not known counts as a kind, None: beside known GPUs it makes the result None as well.
    kinds: set[Device | None] = set()
    for name in names:
        known = (device for device in _DEVICES if re.fullmatch(device.pattern, name))
        kinds.add(next(known, None))
    return kinds.pop() if len(kinds) == 1 else None


def cpu_hardware() -> Hardware:
    """Return the cores and the memory of this machine.

    The figures of a core are those of a common server core, in float32.
    """
    return Hardware(machine().cores(), Device("CPU", float(machine().memory()), 0.15e12, 10e9, 1e9))
