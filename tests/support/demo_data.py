"""Configurations with a base model that are trained on the demo's data, with the limits of the demo.

With `model.path` nothing of this is a default. Tests of other things write no data of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree

GENERATED = {name: [{"path": "synthetic"}] for name in ("sft", "preference", "prompts")}
LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": 64, "max_text_tokens": 512}

YAML = (
    "data: {sft: [{path: synthetic}], preference: [{path: synthetic}], prompts: [{path: synthetic}],"
    " max_prompt_tokens: 64, max_response_tokens: 64, max_text_tokens: 512}\n"
)
"""The same as text, for a file with a base model."""


def with_demo_data(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration with what it leaves out of the demo's data and limits."""
    data = {**GENERATED, **LIMITS, **tree.get("data", {})}
    return {**tree, "data": data, "ppo": {"max_new_tokens": 64, **tree.get("ppo", {})}}


def config_with_demo_data(
    tree: Mapping[str, Any], name: str = "configuration", overrides: Sequence[str] = ()
) -> PipelineConfig:
    """Do the same as `config_from_tree`, with the demo's data."""
    return config_from_tree(with_demo_data(tree), name, overrides)
