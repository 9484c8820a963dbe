"""A store with a listing that is late: it lacks objects that exist, as some S3-compatible servers list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from typing_extensions import override

from rlhf_core.storage.store import Store


class LateListings(Store):
    """A store whose listings lack the objects and folders with keys in which `hidden` is found."""

    hidden = "$^"

    @override
    def sizes(self, prefix: str) -> Mapping[str, int]:
        return {key: size for key, size in super().sizes(prefix).items() if not re.search(self.hidden, key)}

    @override
    def folders(self, prefix: str) -> Sequence[str]:
        return [name for name in super().folders(prefix) if not re.search(self.hidden, f"{prefix}/{name}/")]
