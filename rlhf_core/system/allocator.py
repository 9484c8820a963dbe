"""Settings of glibc's malloc, for processes that compute on a CPU. Other C libraries ignore them."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_KEPT_BLOCK = 256 << 20
_KEPT_BLOCK_BEFORE_GLIBC_235 = 32 << 20


def keep_freed_memory() -> None:
    """Let this process reuse the memory of tensors that it has freed.

    By default glibc returns most of it to the system and asks for it again in the next forward pass. The
    system then clears every page, which took a tenth of the time of a PPO step (decision 5).
    """
    if not _set(_M_MMAP_THRESHOLD, _KEPT_BLOCK):
        _set(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BEFORE_GLIBC_235)
    _set(_M_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Let this process return each large tensor to the system when it is freed.

    Otherwise small tensors that are allocated inside a freed layer prevent that the next layer fits there. A
    process that gathers the layers of a model in turn would grow to the size of the whole model.
    """
    _set(_M_MMAP_THRESHOLD, 1 << 20)
    _set(_M_TRIM_THRESHOLD, 1 << 20)


def _set(option: int, value: int) -> bool:
    """Call `mallopt`, and return whether it has accepted the value."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(option, value) == 1
