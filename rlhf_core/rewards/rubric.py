"""Rubrics: text files that tell a language model what makes an answer good."""

from __future__ import annotations

import hashlib

from rlhf_core.errors import ConfigError
from rlhf_core.system.files import read_bounded

_MAX_BYTES = 64 << 10


def read_rubric(path: str, field: str, digest: str | None = None) -> str:
    """Return the content of a rubric without surrounding blanks.

    Args:
        path: A UTF-8 text file of at most 64 KiB.
        field: Its name in messages.
        digest: sha256 of the file at the beginning of the run. None: any file.

    Raises:
        ConfigError: It cannot be read, is empty, or was changed.
    """
    try:
        content = read_bounded(path, _MAX_BYTES)
        text = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: cannot be read: {error}; give a UTF-8 text file") from error
    if not text:
        raise ConfigError(f"{field}: {path} is empty; say what makes an answer better, or leave it out")
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError(f"{field}: {path} was changed after the run began; run again")
    return text
