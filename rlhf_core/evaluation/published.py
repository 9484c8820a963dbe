"""Compares the files of a PPO run with an adapter with the policy that it trained.

    logprob_gap      mean |log p(training process) - log p(trained files)| over response tokens
    logprob_update   mean |log p(trained files) - log p(SFT model)|: the effect of training
    logprob_change   mean |log p(training process) - log p(SFT model)|
    loss             mean |log p(trained files) - log p(evaluated files)| / update
    merge_loss       the same for `policy/`, the merge, if it is rounded to the lower precision of training
                     and engines

Trained files are the SFT model and the adapter, which are not rounded. Evaluated files are described in
`policy_files`. `logprob_update`, `loss` and `merge_loss` use models that this process loads, with the same
batches, so that rounding of sums does not count as a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import GateFailed
from rlhf_core.evaluation.policy_files import PolicyFiles, policy_files
from rlhf_core.evaluation.rank_scoring import evaluation_session
from rlhf_core.evaluation.scoring import ResponseScorer
from rlhf_core.ppo.training.batch import FloatArray
from rlhf_core.types import PromptAndResponse, StageContext

log = logging.getLogger(__name__)

SEQUENCES = 64
"""Number of responses for the measurement."""

_ROUNDING = 1e-5
"""Smaller gaps are caused by the order of float32 sums."""

_ROUNDING_16_BIT = 0.02
"""Smaller gaps between two processes can be caused by different batches and kernels in 16 bits."""
_LARGEST_GAP_16_BIT = 0.05
"""Larger gaps in 16 bits need a higher `ppo.weight_sync.canary_tolerance`."""


@dataclass(frozen=True)
class TrainedPolicy:
    """Responses with the log-probabilities of the trained weights in the training processes."""

    sequences: Sequence[PromptAndResponse]
    logprobs: Sequence[FloatArray]
    """(T,) each."""


def measure_published(
    config: PipelineConfig,
    trained: TrainedPolicy,
    ppo: Path,
    sft: Path,
    *,
    pad_id: int,
    device: str,
    context: StageContext,
) -> dict[str, float]:
    """Compute the measures in the module's docstring, named `published/...`.

    `stages.gates` checks the limit of `loss`.

    Args:
        config: The whole configuration.
        trained: Sequences, and their log-probabilities in the training process. Empty responses are ignored.
        ppo: Folder with the files of the PPO policy.
        sft: Folder with the SFT model.
        pad_id: Padding token.
        device: "cpu" or "cuda".
        context: Context of the stage, for ranks in other processes.

    Raises:
        GateFailed: The files do not match the training process, or no response has a token.
    """
    lora = config.ppo.lora
    assert lora is not None
    rows = [row for row, (_, response) in enumerate(trained.sequences) if response]
    if not rows:
        raise GateFailed(
            "ppo: the last rollouts have no response token, so the files cannot be compared with the trained"
            " policy; check the reward, or raise ppo.kl.coef"
        )
    sequences = [trained.sequences[row] for row in rows]
    scorer = ResponseScorer(config, pad_id, device, context)

    def logprobs_of(files: PolicyFiles, dtype: str) -> list[Tensor]:
        return scorer.logprobs(files, sequences, config.ppo.temperature, dtype)

    dtype: str = config.ppo.policy_deepspeed.dtype
    in_process = [torch.from_numpy(trained.logprobs[row]) for row in rows]
    with evaluation_session(config, device, context):
        if lora.quantize is not None:
            # A quantized adapter belongs to rounded weights, which only exist in the training process.
            served, loaded, exact = dtype, in_process, in_process
        else:
            files, served = PolicyFiles(sft / "model", ppo / "adapter"), config.ppo.served_dtype
            loaded = logprobs_of(files, dtype)
            exact = loaded if served == dtype else logprobs_of(files, served)
        untrained = logprobs_of(PolicyFiles(sft / "model"), served)
        update = mean_gap(exact, untrained)
        merged_logprobs = logprobs_of(PolicyFiles(ppo / "policy"), served)
        merged = _share(mean_gap(exact, merged_logprobs), update)
    found = {
        "published/logprob_gap": mean_gap(in_process, loaded),
        "published/logprob_update": update,
        "published/logprob_change": mean_gap(in_process, untrained),
        "published/loss": merged if policy_files(config.ppo, ppo, lambda: sft).adapter is None else 0.0,
        "published/merge_loss": merged,
    }
    allowed = _allowed_gap(config, found["published/logprob_change"])
    # Not `>`, because a gap of NaN must fail as well.
    if not found["published/logprob_gap"] <= allowed:
        raise GateFailed(
            "ppo: SFT model and adapter, loaded from their files, differ from the trained policy by"
            f" {found['published/logprob_gap']:.4g} nats per token, more than {allowed:.4g} (the distance of"
            f" the trained policy from the SFT model is {found['published/logprob_change']:.4g}): the files"
            " do not match the policy; if the difference is rounding, raise"
            " ppo.weight_sync.canary_tolerance"
        )
    if merged > config.ppo.published_loss_limit:
        log.warning(
            "policy/ (the merged model, in float32) loses %.0f %% of the change by training if it is loaded"
            " in %s; serve the SFT model with adapter/, or policy/ in float32",
            100 * merged,
            served,
        )
    return found


def _allowed_gap(config: PipelineConfig, change: float) -> float:
    """Return the largest `logprob_gap` of files that match the policy.

    If the adapter in the files has no effect, the gap is the whole `change`, which can be smaller than the
    limit for 16 bits. At most half of it is therefore allowed, unless that is less than rounding.
    """
    tolerance: float = config.ppo.weight_sync.canary_tolerance
    if config.ppo.policy_deepspeed.dtype == "float32" or tolerance > _LARGEST_GAP_16_BIT:
        return tolerance
    return min(_LARGEST_GAP_16_BIT, max(_ROUNDING_16_BIT, change / 2))


def _share(gap: float, update: float) -> float:
    """Return `gap` as a share of `update`; 0 if the gap is only rounding."""
    return gap / max(update, _ROUNDING) if gap > _ROUNDING else 0.0


def mean_gap(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the mean absolute difference over all tokens."""
    return float((torch.cat(list(left)).double() - torch.cat(list(right)).double()).abs().mean())
