"""File systems that a machine of a test need not have."""

from __future__ import annotations

import errno
import os

import pytest


def without_hard_links(patch: pytest.MonkeyPatch) -> None:
    """Have every hard link refused, as on FAT and on many network file systems."""

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    patch.setattr(os, "link", refuse)
