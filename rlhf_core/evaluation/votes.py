"""Files of votes that the pages of `rlhf review` save, as inputs of a run: `register.votes`."""

from __future__ import annotations

import hashlib
import json

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.system.files import read_bounded

FORMAT = "rlhf-review-1"
MAX_BYTES = 2**24
"""Largest size of a file."""


def read_vote_files(config: PipelineConfig) -> dict[str, str]:
    """Return the texts of the files in `register.votes`, by field.

    Raises ConfigError for a file that no page saved.
    """
    found = {}
    for index, path in enumerate(config.register_.votes):
        field = f"register.votes.{index}"
        try:
            found[field] = read_bounded(path, MAX_BYTES).decode()
            page_of(found[field])
        except (OSError, UnicodeDecodeError, InputError) as error:
            raise ConfigError(f"{field}: cannot read {path}: {error}") from error
    return found


def vote_digest(text: str) -> str:
    """Return the sha256 of a file of votes."""
    return hashlib.sha256(text.encode()).hexdigest()


def page_of(text: str) -> str:
    """Return the digest of the page that saved this file of votes.

    Raises InputError if no page did.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"votes must be a file that a review page saved ({FORMAT}); choose another")
    return str(content.get("page"))
