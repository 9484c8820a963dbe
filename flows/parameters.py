"""The parameters of the flow's form, as overrides of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    named = [f"{field}={parameters[name]}" for name, field in FIELDS.items() if parameters.get(name) is not None]
    return [*named, *(parameters.get("overrides") or ())]
