"""Files of `deployments/`, which is installed next to `rlhf_core`: configurations, templates, services."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.system.files import exists

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
CONFIGS = {file.stem: file for file in sorted((DEPLOYMENTS / "configs").glob("*.yaml"))}
"""The configurations, by their names."""


def shipped(path: str | Path) -> Path:
    """Return `path`, or if there is no such file below the working folder, the installed one of this name.

    >>> shipped("deployments/configs/demo.yaml").is_file()
    True
    """
    given = Path(path)
    if exists(given) or given.parts[:1] != (DEPLOYMENTS.name,):
        return given
    return DEPLOYMENTS.joinpath(*given.parts[1:])
