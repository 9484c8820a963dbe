"""Settings of glibc's malloc, for processes that compute on a CPU. Other C libraries ignore them."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc ignores larger values before version 2.35."""


def keep_freed_memory() -> None:
    """Let this process reuse the memory of tensors that it has freed.

    By default glibc returns most of it to the system and asks for it again in the next forward pass. The
    system then clears every page, which takes up to a quarter of the time of a pass (decision 50).
    """
    _set(mmap_threshold=_LARGEST_MMAP_THRESHOLD, trim_threshold=-1)


def return_freed_memory() -> None:
    """Let this process return each large tensor to the system when it is freed.

    Otherwise small tensors that are allocated inside a freed layer prevent that the next layer fits there. A
    process that gathers the layers of a model in turn would grow to the size of the whole model.
    """
    _set(mmap_threshold=1 << 20, trim_threshold=1 << 20)


def _set(mmap_threshold: int, trim_threshold: int) -> None:
    """Set both, because setting one makes the other stay as it is.

    Args:
        mmap_threshold: Larger blocks are returned to the system when they are freed, in bytes.
        trim_threshold: Free memory at the end of the heap that is kept, in bytes; -1 keeps all.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)
