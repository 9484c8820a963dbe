"""Looking for a secret after a run: in every file, as plain bytes, base64 and URL encoding, also inside gzip."""

from __future__ import annotations

import base64
import contextlib
import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote


def spellings(secret: str) -> list[bytes]:
    """How it may have been written down. Base64 has three, by what stands before it."""
    plain = secret.encode()
    inner = [base64.b64encode(b"x" * shift + plain)[4 if shift else 0 : -4] for shift in range(3)]
    return list(dict.fromkeys([plain, quote(secret, safe="").encode(), plain[::-1], *inner]))


def found(secret: str, folders: Iterable[Path], *texts: str) -> list[str]:
    """Where it is: files below `folders`, and `texts` by number."""
    wanted = spellings(secret)
    hits = [f"text {number}" for number, text in enumerate(texts) if _has(text.encode(), wanted)]
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and _has(path.read_bytes(), wanted):
                hits.append(str(path))
    return hits


def _has(data: bytes, wanted: list[bytes]) -> bool:
    if data.startswith(b"\x1f\x8b"):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            data += gzip.decompress(data)
    return any(spelling in data for spelling in wanted)
