"""A configuration of small evaluations."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config import PipelineConfig

RULES: list[dict[str, Any]] = [
    {"type": "length", "target": 20, "tolerance": 20},
    {"type": "well_formed", "normalize": "batch"},
]


def config_of(rewards: Sequence[Mapping[str, Any]] = RULES, **sections: Any) -> PipelineConfig:
    base: dict[str, Any] = {
        "run": {"device": "cpu", "seed": 5},
        "ppo": {"rewards": list(rewards)},
        "evaluate": {"prompts": 6, "bootstrap": 200, "samples": 4},
    }
    return PipelineConfig.model_validate_json(json.dumps(base | sections))
