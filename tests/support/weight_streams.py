"""Weights of a model as a stream, for tests of saving."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlhf_core.models.saving import WeightStream


def stream_of(*groups: Mapping[str, torch.Tensor]) -> WeightStream:
    """Return tensors as a stream of these groups."""
    layout = [{name: tensor.detach().to("meta") for name, tensor in group.items()} for group in groups]
    return WeightStream(layout, iter(groups))
