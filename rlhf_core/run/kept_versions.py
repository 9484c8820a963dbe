"""The versions that the references of an unfinished run stand for.

`champion:NAME` can be another version when an interrupted run is started again. Its stages would then have
other keys, and nothing would be reused. A file below `run.home` therefore keeps the numbers of the versions
until the run has finished. Its name is a digest of the configuration before references were resolved.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import pipeline_key, tracking_uri
from rlhf_core.errors import GateFailed, InputError, NonFiniteError, StageHeld
from rlhf_core.run.references import Resolved, references_of, resolve
from rlhf_core.system.files import read_json, write_json
from rlhf_core.system.home import Home

log = logging.getLogger(__name__)

Command = Literal["run", "rounds"]
"""What is continued: a run of the pipeline, or several rounds of it."""


@dataclass(frozen=True)
class KeptVersions:
    """References with the numbers of their versions, and the file that keeps them."""

    file: Path = Path()
    pinned: Mapping[str, str] = field(default_factory=dict)
    """References by field; only those that can stand for another version later."""

    @contextmanager
    def until_finished(self) -> Iterator[None]:
        """Keep the versions while the body runs, and after it if it fails.

        They are not kept after an error that the same configuration would end with again.
        """
        if not self.pinned:
            yield
            return
        write_json(self.file, dict(self.pinned))
        try:
            yield
        except StageHeld:
            raise  # the process that makes the stage may belong to the same run
        except (GateFailed, NonFiniteError, InputError):
            self.file.unlink(missing_ok=True)
            raise
        self.file.unlink(missing_ok=True)


def resolve_kept(config: PipelineConfig, command: Command = "run") -> tuple[Resolved, KeptVersions]:
    """Resolve the references of a configuration, as in its unfinished run if there is one.

    Raises the errors of `resolve`. A kept version that cannot be used any more is a warning.
    """
    if not references_of(config):
        return resolve(config), KeptVersions()
    kept = kept_versions(config, command)
    resolved = resolve(config, kept=kept)
    pinned = {each.field: each.pinned for each in resolved.references if each.pinned != each.text}
    if pinned and kept == pinned:
        log.info(
            "the references are those of an unfinished run; remove %s to resolve them again",
            _file(config, command),
        )
    return resolved, KeptVersions(_file(config, command), pinned)


def kept_versions(config: PipelineConfig, command: Command = "run") -> dict[str, str]:
    """Return the references of an unfinished run by their fields; empty if there is none."""
    if not references_of(config):
        return {}
    content = read_json(_file(config, command)) or {}
    return {name: text for name, text in content.items() if isinstance(text, str)}


def _file(config: PipelineConfig, command: Command) -> Path:
    # Without digests of sources: the references are not resolved yet.
    identity = [command, pipeline_key(config, {}), references_of(config), tracking_uri(config)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Home.of(config.run.home).kept_versions(digest[:16])
