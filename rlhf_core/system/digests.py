"""Digests of JSON content."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def json_sha256(content: Any) -> str:
    """Return the sha256 of JSON content, independent of formatting and of the order of keys, 64 hex digits.

    Stage keys and the checksums of manifests are made with it: another form of the text would change all of
    them. Raises ValueError for NaN and infinity.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
