"""Code that runs as a user whom file modes stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NOBODY = 65534


@contextmanager
def as_unprivileged_user() -> Iterator[None]:
    """Run as `nobody` if this process is root's, and as the same user otherwise. Modules that are imported
    for the first time may not be found.
    """
    is_root = os.getuid() == 0
    if is_root:
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
