"""Constants that are not settings. `rlhf plan` computes memory and time with the sizes."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"]
"""How token losses are added up (`rlhf_core.algo.losses.aggregate`)."""
GroupKind = Literal["grpo", "dr_grpo", "reinforce_baseline", "rloo"]
"""How the scores of the samples of a prompt become advantages (`rlhf_core.algo.advantages.group_advantages`).
"""
HEAD_CHUNK = 1 << 27
"""Logits of a micro-batch that are in memory at a time, in elements: 256 MiB of bfloat16. More are computed
in parts, and again in the backward pass, so that memory does not grow with vocabulary x tokens.
"""
LOSS_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits that are converted to float32 at a time, in elements. On a CPU they are 2 MB, about one core's L2
cache; on a GPU 256 MB, enough to fill it.
"""
REDUCE_BUCKET = 500_000_000
"""Gradients that ZeRO 1-3 reduce at a time, at most. The buffer is allocated as a whole."""
SHORT_ATTENTION = 512
"""Tokens of a sequence up to which `models.attention` computes attention in bfloat16 on a CPU. Torch's
kernel is faster for longer ones.
"""
