"""Stage keys: a hash of everything that the output of a stage depends on.

The same key means the same artifact, across runs and machines. A changed learning rate of PPO changes the
keys of `ppo`, `evaluate` and `register`, and of no earlier stage. The fields declare what they affect, see
`base.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlhf_core.config.base import Section, declared, effect_of
from rlhf_core.config.pipeline import PipelineConfig, device_of
from rlhf_core.pipeline import POLICIES, STAGES, StageName, stages_between
from rlhf_core.system.files import json_sha256, read_json
from rlhf_core.system.home import Home

_PIPELINE_SECTIONS = tuple(
    field.alias or name for name, field in PipelineConfig.model_fields.items() if effect_of(field) == "result"
)
"""Sections that are part of the key of the pipeline. The others say where, how and whether it runs."""


def stage_inputs(config: PipelineConfig, stage: StageName) -> tuple[StageName, ...]:
    """Return the stages whose artifacts `stage` reads with this configuration."""
    row = STAGES[stage]
    inputs = [name for name in row.inputs if is_enabled(config, name)]
    if row.policy_field is not None and is_enabled(config, stage):
        used = _value(config, row.policy_field)
        inputs = [name for name in inputs if name not in POLICIES or name == used]
    return tuple(inputs)


def sources_of_inputs(config: PipelineConfig, stage: StageName) -> tuple[str, ...]:
    """Return the prefixes of external inputs that the keys of the inputs of `stage` contain."""
    of_inputs = {source for name in stage_inputs(config, stage) for source in STAGES[name].sources}
    return tuple(source for source in STAGES[stage].sources_of_inputs if source in of_inputs)


def is_made(config: PipelineConfig, stage: StageName, until: StageName) -> bool:
    """Return whether a run that ends with the stage `until` has `stage`.

    PPO is left out of a run that ends with `sample` if another model answers.
    """
    names = list(STAGES)
    if not is_enabled(config, stage) or names.index(stage) > names.index(until):
        return False
    if stage == "ppo" and until == "sample" and config.sample is not None:
        return "ppo" in stage_inputs(config, until)
    return True


def stages_made(config: PipelineConfig, start: StageName, until: StageName) -> list[StageName]:
    """Return the stages of a run from `start` to `until`. Raises InputError if their order is wrong."""
    return [stage for stage in stages_between(start, until) if is_made(config, stage, until)]


def is_enabled(config: PipelineConfig, stage: StageName) -> bool:
    """Return whether the pipeline of this configuration has `stage`."""
    field = STAGES[stage].enabled_by
    return field is None or bool(_value(config, field))


def sections_read(config: PipelineConfig, stage: StageName) -> tuple[str, ...]:
    """Return the sections that affect the result of `stage` with this configuration."""
    return STAGES[stage].sections + _labelling(config, stage)


def sources_read(config: PipelineConfig, stage: StageName) -> tuple[str, ...]:
    """Return the prefixes of the external inputs that `stage` reads with this configuration."""
    return STAGES[stage].sources + _labelling(config, stage)


def _labelling(config: PipelineConfig, stage: StageName) -> tuple[str, ...]:
    if config.labels_by_language_model:
        return STAGES[stage].labelling
    return ()


def sources_in_key(
    config: PipelineConfig, stage: StageName, source_digests: Mapping[str, str]
) -> dict[str, str]:
    """Return the digests that are part of the key of a stage, of those of all external inputs."""
    prefixes, of_inputs = sources_read(config, stage), sources_of_inputs(config, stage)
    return {
        name: digest
        for name, digest in source_digests.items()
        if name.startswith(prefixes) and not name.startswith(of_inputs)
    }


def stage_key(
    config: PipelineConfig,
    stage: StageName,
    input_digests: Mapping[str, str],
    source_digests: Mapping[str, str],
) -> str:
    """Return the key of a stage, 16 hex digits. The arguments are those of `key_content`."""
    return key_of(key_content(config, stage, input_digests, source_digests))


def key_of(content: Mapping[str, Any]) -> str:
    """Return the key that is made from `key_content`."""
    return json_sha256(content)[:16]


def key_content(
    config: PipelineConfig,
    stage: StageName,
    input_digests: Mapping[str, str],
    source_digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return what the key of a stage is made from, as JSON.

    Args:
        config: The whole configuration.
        stage: Name of the stage.
        input_digests: Manifest digest of each input artifact.
        source_digests: Content digests of what the stage reads from outside (data files, the folder of the
            base model), see `sources_in_key`.
    """
    # `sort_keys` of `json_sha256` makes the order of fields and sections irrelevant.
    payload: dict[str, Any] = {
        "stage": stage,
        "schema": STAGES[stage].version,
        # Of the section `run`, only the seed and the resolved device affect results. Threads affect rounding;
        # checkpoints record them with the versions.
        "seed": config.run.seed,
        "device": device_of(config),
        "config": {
            name: _only(STAGES[stage].fields, name, _of_stage(config, name))
            for name in sections_read(config, stage)
        },
        "inputs": dict(sorted(input_digests.items())),
        "sources": dict(sorted(source_digests.items())),
    }
    if STAGES[stage].registers:
        payload["model"] = config.registered_model
        # A model version is in one registry, so another MLflow server needs its own.
        payload["tracking"] = registry_address(config)
    return payload


def _of_stage(config: PipelineConfig, name: str) -> dict[str, Any] | None:
    """Return the settings of a section for the key of a stage. Whether PPO is trained is not one of them: the
    stages that read its policy have its artifact as an input.
    """
    settings = _settings(config, name)
    if name == "ppo" and settings is not None:
        settings.pop("enabled", None)
    return settings


def _only(fields: Mapping[str, tuple[str, ...]], name: str, settings: Any) -> Any:
    """Return the settings of a section without those that do not affect a stage (`Stage.fields`)."""
    if not isinstance(settings, dict):
        return settings
    if name in fields:
        return {key: value for key, value in settings.items() if key in fields[name]}
    return {key: _only(fields, f"{name}.{key}", value) for key, value in settings.items()}


def rounding_settings(config: PipelineConfig, stage: StageName) -> dict[str, str]:
    """Return the settings of `stage` that affect rounding and are not in its key, by their full names."""
    settings: dict[str, str] = {}
    for name in sections_read(config, stage):
        section = _value(config, name)
        if section is not None:
            read = _only(STAGES[stage].fields, name, _rounding_settings(section))
            settings |= {field: str(value) for field, value in leaves(name, read)}
    return settings


def _rounding_settings(section: Section) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            settings[name] = _rounding_settings(value)
        elif effect_of(field) == "rounding":
            settings[name] = value
    return settings


def given_tracking_uri(config: PipelineConfig) -> str | None:
    """Return `tracking.uri`, else MLFLOW_TRACKING_URI, else None."""
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or None


def tracking_uri(config: PipelineConfig) -> str:
    """Return the given tracking URI, else that of an SQLite file in `run.home`."""
    return given_tracking_uri(config) or _own_database(config)


def registry_address(config: PipelineConfig) -> str:
    """Return the tracking URI, or that of the database of `run.home` if it is the server that `rlhf up`
    started for this home: a run has the same keys through both.
    """
    uri = tracking_uri(config)
    ports = read_json(Home(Path(config.run.home)).servers_ports) or {}
    return _own_database(config) if uri == f"http://127.0.0.1:{ports.get('mlflow')}" else uri


def _own_database(config: PipelineConfig) -> str:
    # Absolute, because a relative path is another database in another working folder.
    return f"sqlite:///{Home(Path(config.run.home).absolute()).mlflow_database}"


def pipeline_key(config: PipelineConfig, source_digests: Mapping[str, str]) -> str:
    """Return the key of the whole pipeline, 16 hex digits, from the settings of results, sources and code.

    Other settings are not part of it, so a run that is continued on another machine or with another timeout
    is the same run.
    """
    return json_sha256(_key_payload(config, source_digests))[:16]


def key_fields(config: PipelineConfig, source_digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what the pipeline key is made from, by flat names such as `ppo.kl.coef`, to compare two runs."""
    payload = _key_payload(config, source_digests)
    fields = {"run.seed": payload.pop("seed"), "run.name": payload.pop("name")}
    for name, part in payload.pop("config").items():
        fields.update(leaves(name, part))
    for name, part in payload.items():
        fields.update(leaves(name, part))
    return fields


def _key_payload(config: PipelineConfig, source_digests: Mapping[str, str]) -> dict[str, Any]:
    absent = {
        name for name, stage in STAGES.items() if not stage.always_in_key and not is_enabled(config, name)
    }
    return {
        "schema": {name: stage.version for name, stage in STAGES.items() if name not in absent},
        # The run of the pipeline in MLflow is found by this key, and it is in one experiment, by one name.
        "name": config.run.name,
        "experiment": config.experiment,
        "seed": config.run.seed,
        "device": device_of(config),
        "config": {name: _settings(config, name) for name in _PIPELINE_SECTIONS if name not in absent},
        "sources": dict(sorted(source_digests.items())),
    }


def pipeline_name(config: PipelineConfig, key: str) -> str:
    """Return the name of a pipeline for folders and trackers: `demo-seed0-1c38a75c`."""
    return f"{config.run.name}-seed{config.run.seed}-{key[:8]}"


def flat(config: PipelineConfig, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """Return `{"ppo.kl.coef": 0.05, ...}` without null values, of some top-level sections or of all."""
    dump = config.model_dump(mode="json", by_alias=True)
    found: dict[str, Any] = {}
    for section in sections or dump:
        found.update(leaves(section, dump[section]))
    return found


def changed(config: PipelineConfig, sections: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what `flat` returns, without the values that are defaults."""
    defaults = flat(type(config)(), sections)
    found = flat(config, sections)
    # What has no value there, such as a limit that was set to null, is left out of `flat`.
    unset = {name: None for name in defaults if name not in found}
    return unset | {name: value for name, value in found.items() if defaults.get(name) != value}


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of everything in the nested `value` that is not None."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{prefix}.{name}", part)
    elif value is not None:
        yield prefix, value


def result_settings(section: Section) -> dict[str, Any]:
    """Return the settings of a section, as JSON, that affect the result by their value.

    A section that is declared as `execution`, such as `store`, is left out as a whole, and so is a field
    declared with `later` while it has its default, and a part of an inheriting section, such as
    `reward.judge`, that equals the inherited one.
    """
    dump = section.model_dump(mode="json", by_alias=True)
    settings: dict[str, Any] = dict(section.constants)
    for name, field in type(section).model_fields.items():
        if effect_of(field) != "result":
            continue
        key = field.alias or name
        value = getattr(section, name)
        if declared(field, "later") and value == field.default:
            continue
        if isinstance(value, Section):
            settings[key] = result_settings(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            settings[key] = [result_settings(item) for item in value]
        else:
            settings[key] = dump[key]
    # In a second pass, when all settings that can be inherited are known.
    for name, field in type(section).model_fields.items():
        if declared(field, "inherits") and name in settings:
            own: dict[str, Any] = settings[name]
            settings[name] = {part: own[part] for part in own if own[part] != settings.get(part)}
    return settings


def _settings(config: PipelineConfig, name: str) -> dict[str, Any] | None:
    """Return the settings of a section, such as `ppo` or `reward.judge`; None if it is null."""
    section = _value(config, name)
    return None if section is None else result_settings(section)


def _value(config: PipelineConfig, path: str) -> Any:
    """Return the value of a section or field by its path in the YAML file."""
    first, *rest = path.split(".")
    # `register` is a method of pydantic's metaclass, so the attribute has another name.
    aliases = {field.alias: name for name, field in PipelineConfig.model_fields.items() if field.alias}
    return attrgetter(".".join([aliases.get(first, first), *rest]))(config)
