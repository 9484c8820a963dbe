"""Free disk space, asked for before something large is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlhf_core.errors import StoreError


def require_free(folder: Path, size: int, what: str) -> None:
    """Raises StoreError with both numbers unless the disk of `folder` (which need not exist yet) has `size`
    bytes free.

    `what`: beginning of the sentence, such as "The checkpoint of step 8".
    """
    place = _existing(folder)
    free = shutil.disk_usage(place).free
    if free < size:
        raise StoreError(
            f"{what} needs {_shown(size)}, but {place} has {_shown(free)} free; free some space there and"
            " type the same command again. What was saved before is untouched."
        )


def on_one_disk(one: Path, other: Path) -> bool:
    """Whether a file of one folder can be linked into the other; neither need exist yet."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(folder: Path) -> Path:
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _shown(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
