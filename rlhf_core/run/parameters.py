"""The parameters of the flow's form, as overrides of the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import InputError
from rlhf_core.types import STAGES, StageName

DEFAULT_CONFIG = "deployments/configs/demo.yaml"

FIELDS = {
    "name": "run.name",
    "seed": "run.seed",
    "ppo_steps": "ppo.steps",
    "kl_coef": "ppo.kl.coef",
    "policy_learning_rate": "ppo.policy.learning_rate",
}
"""Parameter of the form -> field of the configuration."""


def overrides_of(parameters: Mapping[str, Any]) -> list[str]:
    """`section.field=value` for each parameter given; those in `overrides` come last and win."""
    given = {field: parameters[name] for name, field in FIELDS.items() if parameters.get(name) is not None}
    named = [
        f"{field}={json.dumps(value)}" for field, value in given.items()
    ]  # JSON is YAML: "1e3" stays a name
    return [*named, *(parameters.get("overrides") or ())]


def check_range(start: StageName, until: StageName) -> None:
    """Raises InputError if no stage lies between them."""
    if STAGES.index(start) > STAGES.index(until):
        raise InputError(f"--from {start} comes after --until {until}; the stages are {', '.join(STAGES)}")
