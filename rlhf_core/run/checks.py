"""Preflight of a run: load and check its configuration, create its home and try its store."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import stages_made
from rlhf_core.config.load import load_config
from rlhf_core.errors import checking
from rlhf_core.pipeline import FIRST_STAGE, LAST_STAGE, StageName
from rlhf_core.preflight import check
from rlhf_core.run.references import KeptVersions, resolve_kept
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


# No argument of the flow, because Prefect calls it, and stores its arguments as JSON.
_CHECKED: contextvars.ContextVar[CheckedConfig | None] = contextvars.ContextVar(
    "checked_config", default=None
)


def load_and_check(
    path: str,
    overrides: Sequence[str],
    *,
    retry_store: bool = False,
    start: StageName = FIRST_STAGE,
    until: StageName = LAST_STAGE,
) -> CheckedConfig:
    """Load the configuration, check it, create its home and try its store.

    Args:
        path: YAML file.
        overrides: Fields to override, each as `section.field=value`.
        retry_store: Retry temporary failures of the store for `store.retry_seconds`, because no user is
            waiting.
        start: The first stage of the run.
        until: Its last stage. Devices that only other stages need are a warning.

    Raises:
        InputError: Everything that is wrong with the configuration.
        StoreUnavailable: The store does not answer.
    """
    with checking(path):
        resolved, kept = resolve_kept(load_config(path, overrides))
        warnings = check_and_prepare(resolved.config, path, retry_store=retry_store, start=start, until=until)
    return CheckedConfig(resolved.config, tuple(warnings), path, tuple(overrides), resolved.tags, kept)


def check_and_prepare(
    config: PipelineConfig,
    name: str,
    *,
    retry_store: bool = False,
    start: StageName = FIRST_STAGE,
    until: StageName = LAST_STAGE,
) -> list[str]:
    """Check a loaded configuration, create its home and try its store. Return the warnings.

    Raises the errors of `load_and_check`.

    Args:
        config: The configuration.
        name: Its name in messages.
        retry_store: See `load_and_check`.
        start: The first stage of the run.
        until: Its last stage.
    """
    stages = stages_made(config, start, until)
    with checking(name):
        warnings = check(config, stages=stages)
    # After the checks, so that a configuration that is refused leaves no folder behind.
    Home.of(config.run.home).make()
    store = open_store(config)
    if retry_store:
        store.check(config.store.retry_seconds)
    else:
        store.check()
    return warnings


def remember_check(checked: CheckedConfig) -> None:
    """Keep `checked` for `reuse_or_check` in this context, so that a command and its flow check once."""
    _CHECKED.set(checked)


def reuse_or_check(
    path: str, overrides: Sequence[str], *, start: StageName = FIRST_STAGE, until: StageName = LAST_STAGE
) -> CheckedConfig:
    """Return what `remember_check` has kept for this file and these overrides, otherwise `load_and_check`
    with `retry_store`.

    Args:
        path: YAML file.
        overrides: Fields to override.
        start: The first stage of the run.
        until: Its last stage.
    """
    checked = _CHECKED.get()
    if checked is not None and (checked.path, checked.overrides) == (path, tuple(overrides)):
        return checked
    # A flow that nobody has checked runs on a worker, where no user waits.
    return load_and_check(path, overrides, retry_store=True, start=start, until=until)
