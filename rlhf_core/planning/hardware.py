"""Devices as `rlhf plan --gpus` names them: memory, arithmetic, bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhf_core.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator; figures of its data sheet, dense bfloat16."""

    name: str
    memory: float
    """Bytes a process can get: what the driver reports free on an empty device."""
    flops: float
    """bfloat16 multiply-adds counted as two, per second."""
    bandwidth: float
    """Bytes per second from its own memory."""
    link: float
    """Bytes per second to a neighbour: NVLink, or PCIe where there is none."""


_DEVICES = {
    device.name: device
    for device in (
        Device("A100-40G", 39.4 * GIB, 312e12, 1.555e12, 300e9),
        Device("A100-80G", 79.1 * GIB, 312e12, 2.039e12, 300e9),
        Device("H100-80G", 79.1 * GIB, 989e12, 3.35e12, 450e9),
        Device("H200-141G", 139.7 * GIB, 989e12, 4.8e12, 450e9),
        Device("L40S-48G", 44.4 * GIB, 362e12, 0.864e12, 32e9),
        Device("RTX4090-24G", 23.5 * GIB, 165e12, 1.008e12, 25e9),
    )
}


def parse_gpus(text: str) -> tuple[int, Device]:
    """`8xA100-80G`, `A100-80G` (one), in any case. Raises ConfigError with the known names."""
    found = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?([\w-]+)", text.strip())
    name = found[2].upper() if found else ""
    matches = [device for known, device in _DEVICES.items() if known.upper() == name]
    # A name without its memory is enough where only one device has it.
    matches = matches or [device for known, device in _DEVICES.items() if known.upper().split("-")[0] == name]
    if found is None or len(matches) != 1 or found[1] == "0":
        raise ConfigError(
            f"--gpus: must be a count and a device, such as 8xA100-80G; got {text!r}; known: {', '.join(_DEVICES)}"
        )
    return int(found[1] or 1), matches[0]
