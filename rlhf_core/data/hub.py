"""The Hugging Face hub: resolve revisions to commits for stage keys, download models to the cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

from rlhf_core.system.waiting import within

log = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 5.0
"""Time limit for each read."""
_TOTAL_SECONDS = 20.0
"""Time limit for the whole request."""


# Asked once in a process: with a push between two questions, key and data would be of different commits.
@cache
def resolve_revision(
    repo: str, kind: Literal["model", "dataset"], revision: str | None, seconds: float = _TOTAL_SECONDS
) -> str:
    """Return the commit of `repo` at `revision`, a branch or tag, or `main` for None.

    The hub is asked first, then the local cache. If neither has it, the name itself is returned with a
    warning, because changes on the hub are then not noticed. `seconds` limits the request to the hub.
    """
    name = revision or "main"
    # A commit never changes, so the hub need not be asked.
    if _COMMIT.fullmatch(name):
        return name
    commit = _ask_hub(repo, kind, name, seconds) or _cached(repo, kind, name)
    if commit is None:
        log.warning(
            "%s %s: the commit of %r is not known here; pin `revision` to notice changes", kind, repo, name
        )
    return commit or name


def fetch_model(repo: str, revision: str | None) -> None:
    """Download the files of a model to the local cache, without a time limit.

    A failure is only logged here. Loading the model will raise an error for it.
    """
    from huggingface_hub import snapshot_download

    # With README.md, which names the licence: the card of a published policy repeats it.
    with _optional(f"model {repo}: not fetched"):
        # Weights in other formats than safetensors are never loaded.
        snapshot_download(
            repo, revision=revision, allow_patterns=["*.json", "model*.safetensors", "README.md"]
        )


def cached_card(repo: str, revision: str, kind: Literal["model", "dataset"] = "model") -> Path | None:
    """Return the card of a model or data set at a commit, branch or tag, if it is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "README.md", revision=revision, repo_type=kind)
    # Not `is not None`: huggingface_hub returns an object of its own for a file that is known to be absent.
    return Path(found) if isinstance(found, str) else None


def _ask_hub(repo: str, kind: str, name: str, seconds: float) -> str | None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    commit: str | None = None
    with _optional(f"{kind} {repo}: the hub did not answer"):
        info = within(
            seconds,
            lambda: HfApi().repo_info(repo, repo_type=kind, revision=name, timeout=_SECONDS),
        )
        commit = info.sha
    return commit  # noqa: RET504 an error may have left the block before


@contextmanager
def _optional(problem: str) -> Generator[None]:
    """Log what the client of the hub raises, of many unrelated types: the local cache may be enough."""
    try:
        yield
    except Exception as error:
        log.debug("%s: %s", problem, error)


def _cached(repo: str, kind: str, name: str) -> str | None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    ref = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type=kind) / "refs" / name
    return ref.read_text().strip() if ref.is_file() else None
