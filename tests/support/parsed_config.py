"""A configuration from the bytes of a YAML file."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.yaml import parse


def parse_config(data: bytes, name: str = "configuration", overrides: Sequence[str] = ()) -> PipelineConfig:
    """As `load_config`, from bytes. `name` stands for the file in messages, which have no lines."""
    return config_from_tree(parse(data, name).tree, name, overrides)
