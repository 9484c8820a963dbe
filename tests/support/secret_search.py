"""Search the files of a run for a secret: as plain bytes, in base64 and URL encoding, also inside gzip."""

from __future__ import annotations

import base64
import contextlib
import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote


def encodings_of(secret: str) -> list[bytes]:
    """Return the encodings of `secret`. Base64 has three, one for each alignment."""
    plain = secret.encode()
    inner = [base64.b64encode(b"x" * shift + plain)[4 if shift else 0 : -4] for shift in range(3)]
    return list(dict.fromkeys([plain, quote(secret, safe="").encode(), plain[::-1], *inner]))


def find_secret(secret: str, folders: Iterable[Path], *texts: str) -> list[str]:
    """Return the files below `folders` and the numbers of the `texts` that contain `secret`."""
    encodings = encodings_of(secret)
    matches = [f"text {number}" for number, text in enumerate(texts) if _contains(text.encode(), encodings)]
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and _contains(path.read_bytes(), encodings):
                matches.append(str(path))
    return matches


def _contains(data: bytes, encodings: list[bytes]) -> bool:
    if data.startswith(b"\x1f\x8b"):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            data += gzip.decompress(data)
    return any(encoding in data for encoding in encodings)
