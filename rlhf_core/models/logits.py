"""Logits of architectures that scale or cap the output of their language-model head."""

from __future__ import annotations

from typing import Any

import torch


def logits_of(head_output: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the logits (..., V) of a model from the output (..., V) of its head.

    | field of `config` | models | logits |
    |---|---|---|
    | `logits_scaling` | Granite | divided by it |
    | `logit_scale` | Cohere | multiplied by it |
    | `final_logit_softcapping` | Gemma 2 | `cap * tanh(output / cap)` |

    Other models return the output itself. As transformers computes it, in the data type of the output.
    """
    scaling, scale = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = head_output
    if scaling is not None:
        logits = logits / scaling
    if scale is not None:
        logits = logits * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
