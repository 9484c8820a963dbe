"""Memory, arithmetic and bandwidth of devices: those of `rlhf plan --gpus`, or those of this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from rlhf_core.config.devices import cpu_cores, gpu_names, visible_gpus
from rlhf_core.errors import ConfigError

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
    """Regular expression for its name in the driver."""

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are cores, which share one memory."""
        return self.name == "CPU"


@dataclass(frozen=True)
class Hardware:
    """Equal devices of one host."""

    count: int
    device: Device

    def __str__(self) -> str:
        return f"{self.count} CPU cores" if self.device.is_cpu else f"{self.count} x {self.device.name}"


_DEVICES = {
    device.name: device
    for device in (
        Device("A100-40G", 39.4 * GIB, 312e12, 1.555e12, 300e9, "A100.*40GB"),
        Device("A100-80G", 79.1 * GIB, 312e12, 2.039e12, 300e9, "A100.*80GB"),
        Device("H100-80G", 79.1 * GIB, 989e12, 3.35e12, 450e9, "H100"),
        Device("H200-141G", 139.7 * GIB, 989e12, 4.8e12, 450e9, "H200"),
        Device("L40S-48G", 44.4 * GIB, 362e12, 0.864e12, 32e9, "L40S"),
        Device("RTX4090-24G", 23.5 * GIB, 165e12, 1.008e12, 25e9, "RTX 4090"),
    )
}


def parse_gpus(text: str) -> Hardware:
    """Parse `8xA100-80G` or `A100-80G` (one), in upper or lower case.

    Raises ConfigError with the known names.
    """
    match = re.fullmatch(r"(?:([0-9]{1,6})\s*[xX*]\s*)?([\w-]+)", text.strip())
    name = match[2].upper() if match else ""
    matches = [device for known, device in _DEVICES.items() if known.upper() == name]
    # A name without its memory is enough where only one device has it.
    matches = matches or [device for known, device in _DEVICES.items() if known.upper().split("-")[0] == name]
    if match is None or len(matches) != 1 or (match[1] and int(match[1]) == 0):
        raise ConfigError(
            f"--gpus: must be a count and a device, such as 8xA100-80G; got {text!r}; known:"
            f" {', '.join(_DEVICES)}"
        )
    return Hardware(int(match[1] or 1), matches[0])


def visible_hardware() -> Hardware | None:
    """Return the visible GPUs of this machine, or None without GPUs and for unknown or different ones."""
    count = visible_gpus()
    names = gpu_names() if count else []
    kinds = {device for name in names for device in _DEVICES.values() if re.search(device.pattern, name)}
    return Hardware(count, kinds.pop()) if len(kinds) == 1 else None


def cpu_hardware() -> Hardware:
    """Return the cores and the memory of this machine.

    The figures of a core are those of a common server core, in float32.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(cpu_cores(), Device("CPU", float(memory), 0.15e12, 10e9, 1e9))
