"""The free space that a host needs for a stage: its inputs, its part of a checkpoint, and small files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_core.storage.bundles import on_one_disk
from rlhf_core.system.files import existing_parent
from rlhf_core.system.home import Home
from rlhf_core.system.machine import machine

MIN_FREE_BYTES = 200_000_000
"""Space for logs, stacks and other small files."""


class Space(NamedTuple):
    """The disks of one host."""

    free: int
    """Free bytes in `run.home/work`."""
    to_fetch: int
    """Bytes of the inputs of the stage that the host does not have yet."""
    cache_free: int | None = None
    """Free bytes in `run.home/cache`, if it is on another disk than `run.home/work`."""


def space_of(home: Path, copies: Mapping[str, int]) -> Space:
    """Return the space of this host.

    Args:
        home: `run.home`. It need not exist yet.
        copies: See `Nodes.copies`.
    """
    cache, works = Home.of(home).cache, Home.of(home).works
    # A copy that an earlier attempt has begun needs only the rest.
    to_fetch = sum(max(0, size - bytes_below(cache / name)) for name, size in copies.items())
    free = machine().disk(existing_parent(works)).free
    cache_free = None if on_one_disk(cache, works) else machine().disk(existing_parent(cache)).free
    return Space(free, to_fetch, cache_free)


def bytes_below(folder: Path) -> int:
    """Return the size of all files below `folder`. Other processes may delete files at the same time."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).stat().st_size
    return size


def space_problem(home: str, space: Space, part: int = 0) -> str:
    """Return a text that lists the needed space if a host has too little, otherwise an empty string.

    Args:
        home: `run.home`, for the message.
        space: Free and needed space of the host.
        part: Bytes of its part of a checkpoint; 0 as long as its ranks are not known.
    """
    if space.cache_free is not None and space.cache_free < space.to_fetch:
        return (
            f"run.home={home}: {space.cache_free / 1e6:.0f} MB free in cache, at least"
            f" {space.to_fetch / 1e6:.0f} are needed for the inputs of the stage"
        )
    needs = {
        "its part of a checkpoint": part,
        "the inputs of the stage": space.to_fetch if space.cache_free is None else 0,
        "logs and other files": MIN_FREE_BYTES,
    }
    needed = sum(needs.values())
    if space.free >= needed:
        return ""
    described = ", ".join(f"{size / 1e6:.0f} for {what}" for what, size in needs.items() if size)
    return (
        f"run.home={home}: {space.free / 1e6:.0f} MB free, at least {needed / 1e6:.0f} are needed:"
        f" {described}"
    )
