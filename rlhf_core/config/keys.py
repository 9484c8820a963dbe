"""Stage keys: what a stage's output depends on, as one hash.

The same key is the same artifact, across runs and machines; a changed learning rate of PPO changes the keys
of `ppo`, `evaluate` and `register` and of nothing before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.devices import runs_on_gpu
from rlhf_core.config.flat import flat, leaves
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.types import StageName

SCHEMA: dict[StageName, int] = {"data": 4, "sft": 5, "reward": 6, "ppo": 9, "evaluate": 9, "register": 4}
"""Version of each stage's code: raise it when the same configuration gives another result."""

INPUTS: dict[StageName, tuple[StageName, ...]] = {
    "data": (),
    "sft": ("data",),
    "reward": ("data", "sft"),
    "ppo": ("data", "sft", "reward"),
    "evaluate": ("data", "sft", "reward", "ppo"),
    "register": ("data", "sft", "reward", "ppo", "evaluate"),
}
"""Which artifacts a stage reads. `reward` drops out of all where no reward model is trained."""

_SECTIONS: dict[StageName, tuple[str, ...]] = {
    "data": ("model", "data"),
    "sft": ("model", "sft"),
    "reward": ("model", "reward"),
    "ppo": ("model", "ppo"),
    "evaluate": ("evaluate", "ppo"),
    "register": ("register",),
}

_NOT_RESULTS = {
    "allow_other_ranks",
    "allowed_hosts",
    "backoff",
    "breaker_failures",
    "breaker_seconds",
    "bucket_mib",
    "canary",
    "canary_tolerance",
    "checkpoint_every",
    "concurrency",
    "eval_every",
    "gpu_memory_utilization",
    "gradient_checkpointing",
    "guards",
    "hpz",
    "items_per_request",
    "kv_cache_gib",
    "logprob_gap_limit",
    "max_kl",
    "max_num_seqs",
    "max_restarts",
    "micro_batch_tokens",
    "min_accuracy",
    "min_count",
    "published_loss_limit",
    "ranks",
    "reference_ranks",
    "retries",
    "reward_ranks",
    "samples_every",
    "timeout",
}
"""Fields that change when and where things happen, not what comes out (more than by rounding)."""

_ROUNDING = {
    "gradient_checkpointing",
    "hpz",
    "max_num_seqs",
    "micro_batch_tokens",
    "reference_ranks",
    "reward_ranks",
}
"""Those of them by which sums are made in another order: the same numbers, but not the same bits."""

_BY_CONTENT = {"chat_template", "file", "path", "revision"}
"""Addresses of what is read from outside: its content is in the key, by digest, and may move."""


_NAMED_BY_USERS = {"rename"}
"""Fields whose own keys are anybody's words."""


def stage_inputs(config: PipelineConfig, stage: StageName) -> tuple[StageName, ...]:
    """The stages whose artifacts `stage` reads under this configuration."""
    return tuple(name for name in INPUTS[stage] if name != "reward" or config.reward.enabled)


def stage_key(
    config: PipelineConfig,
    stage: StageName,
    input_digests: Mapping[str, str],
    source_digests: Mapping[str, str],
) -> str:
    """16 hex digits. `input_digests`: manifest digest of each input artifact. `source_digests`: content
    digests of what the stage reads from outside (data files, the base model's folder), see
    `rlhf_core.data.sources`.
    """
    dump = config.model_dump(mode="json", by_alias=True)
    payload: dict[str, Any] = {
        "stage": stage,
        "schema": SCHEMA[stage],
        "seed": config.run.seed,
        "device": "cuda" if runs_on_gpu(config) else "cpu",
        "config": {name: result_settings(dump[name]) for name in _SECTIONS[stage]},
        "inputs": dict(sorted(input_digests.items())),
        "sources": dict(sorted(source_digests.items())),
    }
    if stage == "register":
        payload["model"] = config.registered_model
        # A version lives in one registry: another MLflow needs its own.
        payload["tracking"] = tracking_uri(config)
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def roundings(config: PipelineConfig, stage: StageName) -> dict[str, str]:
    """What decides about the bits of `stage` and is not in its key, by the field's name."""
    sections = {f"{section}." for section in _SECTIONS[stage]}
    return {
        name: str(value)
        for name, value in flat(config).items()
        if name.rpartition(".")[2] in _ROUNDING and any(name.startswith(section) for section in sections)
    }


def tracking_uri(config: PipelineConfig) -> str:
    """The tracker that `config` names, else MLFLOW_TRACKING_URI, else an SQLite file in `run.home`."""
    own = f"sqlite:///{Path(config.run.home).absolute()}/mlflow.db"
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or own


def pipeline_key(config: PipelineConfig, source_digests: Mapping[str, str]) -> str:
    """16 hex digits for the whole pipeline: the same configuration of results, sources and code give the same
    key.

    Where things run and how often they are tried again is left out, so that a run continued elsewhere, or
    with another timeout, is the same run.
    """
    text = json.dumps(
        _decisive(config, source_digests), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def decisive(config: PipelineConfig, source_digests: Mapping[str, str]) -> dict[str, Any]:
    """What is in the key of the whole pipeline, by flat names such as `ppo.kl.coef`: why two runs are not the
    same.
    """
    payload = _decisive(config, source_digests)
    own = {"run.seed": payload.pop("seed"), "run.name": payload.pop("name")}
    settings = [leaf for name, part in payload.pop("config").items() for leaf in leaves(name, part)]
    return (
        own
        | dict(settings)
        | {name: value for part in payload for name, value in leaves(part, payload[part])}
    )


def _decisive(config: PipelineConfig, source_digests: Mapping[str, str]) -> dict[str, Any]:
    dump = config.model_dump(mode="json", by_alias=True)
    return {
        "schema": SCHEMA,
        "name": config.run.name,
        "experiment": config.experiment,
        "seed": config.run.seed,
        "device": "cuda" if runs_on_gpu(config) else "cpu",
        "config": {
            name: result_settings(part)
            for name, part in dump.items()
            if name not in ("run", "store", "tracking")
        },
        "sources": dict(sorted(source_digests.items())),
    }


def pipeline_name(config: PipelineConfig, key: str) -> str:
    """Of the pipeline `key`, for folders and trackers: `demo-seed0-1c38a75c`."""
    return f"{config.run.name}-seed{config.run.seed}-{key[:8]}"


def result_settings(tree: Any) -> Any:
    """Return the settings (dumped as JSON) without those that do not affect results, and without paths of
    files with digests.
    """
    if isinstance(tree, dict):
        return {
            name: value if name in _NAMED_BY_USERS else result_settings(value)
            for name, value in tree.items()
            if name not in _NOT_RESULTS | _BY_CONTENT
        }
    if isinstance(tree, list):
        return [result_settings(value) for value in tree]
    return tree
