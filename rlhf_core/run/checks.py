"""Preflight of a run: load, validate and probe its configuration before anything heavy starts."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import load_config
from rlhf_core.errors import checking
from rlhf_core.planning.fit import check_memory
from rlhf_core.preflight import check
from rlhf_core.run.executors.check import check_executors
from rlhf_core.run.kept_versions import KeptVersions, resolve_kept
from rlhf_core.storage.store import open_store
from rlhf_core.system.home import Home


@dataclass(frozen=True)
class CheckedConfig:
    """A configuration that has passed the preflight."""

    config: PipelineConfig
    warnings: tuple[str, ...]
    """Settings that are valid, but probably not intended."""
    path: str
    """The file that it was loaded from, as it was given; `python` for a configuration made in a program."""
    overrides: tuple[str, ...] = ()
    reference_tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the MLflow run that say what references stood for, see `Resolved.tags`."""
    kept: KeptVersions = field(default_factory=KeptVersions)
    """The versions that the references stand for until the run has finished."""


_CHECKED: contextvars.ContextVar[CheckedConfig | None] = contextvars.ContextVar(
    "checked_config", default=None
)


def check_config(path: str, overrides: Sequence[str], *, retry_store: bool = False) -> CheckedConfig:
    """Load the configuration, check it, create its home and probe its store.

    Args:
        path: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        retry_store: Retry temporary failures of the store for `store.retry_seconds`, because no user is
            waiting.

    Raises:
        InputError: Everything that is wrong with the configuration.
        StoreUnavailable: The store does not answer.
    """
    with checking(path):
        resolved, kept = resolve_kept(load_config(path, overrides))
        warnings = probe(resolved.config, path, retry_store=retry_store)
    return CheckedConfig(resolved.config, tuple(warnings), path, tuple(overrides), resolved.tags, kept)


def probe(config: PipelineConfig, name: str, *, retry_store: bool = False) -> list[str]:
    """Check a loaded configuration, create its home and probe its store. Returns the warnings.

    `name` is the configuration's name in messages. See `check_config`.
    """
    with checking(name):
        warnings = check(config, ("run.executor", check_executors))
        check_memory(config)  # last, because it plans with a configuration that is otherwise right
    Home.of(config.run.home).make()
    store = open_store(config)
    if retry_store:
        store.check(config.store.retry_seconds)
    else:
        store.check()
    return warnings


def reuse_check(checked: CheckedConfig) -> None:
    """Store `checked` for `checked_config` in this context, so that a command and its flow check once."""
    _CHECKED.set(checked)


def checked_config(path: str, overrides: Sequence[str], *, retry_store: bool = False) -> CheckedConfig:
    """Return the configuration that the command of this context has checked, else that of `check_config`."""
    return _checked_by_command(path, overrides) or check_config(path, overrides, retry_store=retry_store)


def loaded_config(path: str, overrides: Sequence[str]) -> PipelineConfig:
    """Return the configuration without probing it: that of `checked_config` if there is one."""
    checked = _checked_by_command(path, overrides)
    return load_config(path, overrides) if checked is None else checked.config


def _checked_by_command(path: str, overrides: Sequence[str]) -> CheckedConfig | None:
    checked = _CHECKED.get()
    if checked is not None and (checked.path, checked.overrides) == (path, tuple(overrides)):
        return checked
    return None
