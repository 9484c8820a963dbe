"""Evaluation of the policy during PPO, with the engines and models of the training, and of the files that the
stage publishes (`measure_published`).

    held-out prompts -> engines -> one response each -> reward, judge, true reward; KL to the reference

The prompts are the last `ppo.evaluate_prompts` held-out ones, because those of the evaluation and the match
must not choose the policy (`evaluation.prompts`). The seed of a response depends on `run.seed`, the
policy version and the prompt, so evaluations do not change the training, and an attempt that repeats one gets
the same numbers.

A language model with `compare: pairs` or `ranking` sees each response together with that of the SFT model to
the same prompt, so its mean value is a win rate over the SFT model. One with `scores` grades each alone, so
that its grades of two versions are comparable.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.algo.groups import effective_count
from rlhf_core.config import PipelineConfig
from rlhf_core.config.rewards import comparing_sources
from rlhf_core.errors import GateFailed
from rlhf_core.evaluation.policy_files import PolicyFiles, policy_files
from rlhf_core.evaluation.rank_scoring import evaluation_session
from rlhf_core.evaluation.scoring import ResponseScorer, has_gold, score_gold
from rlhf_core.evaluation.statistics import distinct_n, group_of, preference
from rlhf_core.evaluation.summary import select
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.reward_actor import DecodedElsewhere
from rlhf_core.ppo.sampling.rollouts import Collector, Composer, RewardInputs
from rlhf_core.ppo.training.batch import FloatArray, RolloutBatch
from rlhf_core.ppo.training.experience import shaped_scores
from rlhf_core.ppo.watching.guards import CORRELATION, CORRELATION_ERROR, DIVERSITY, KL, correlation
from rlhf_core.ppo.watching.selection import OBJECTIVE, HeldOutResult
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, weighted_sum
from rlhf_core.seeds import derive_seed
from rlhf_core.types import PromptAndResponse, PromptExample, RewardInput, StageContext

Columns = dict[str, list[float]]
"""(n,) values by the name of the measure; NaN if a failure of a reward source is masked."""


class AgainstSFT:
    """Scores responses; rewards that compare see the SFT model's response to the same prompt as well."""

    def __init__(self, composer: RewardComposer) -> None:
        self._composer = composer
        self.total = composer.total
        self.responses: list[str] = []
        """(n,) of the SFT model, in the order of the prompts; empty before its evaluation."""

    def score(self, batch: Sequence[RewardInput], model_scores: Sequence[float] | None) -> RewardBatch:
        """See `RewardComposer.score`."""
        samples = list(batch)
        # Version 0 is always evaluated first (`Selection.is_due`), and its responses are the SFT model's.
        self.responses = self.responses or [sample.response for sample in samples]
        opponents = [
            replace(sample, response=text) for sample, text in zip(samples, self.responses, strict=True)
        ]
        return self._composer.score(samples, model_scores, opponents)


class HeldOutEvaluation:
    """Evaluates the policy version that the engines hold.

    Args:
        config: The whole configuration.
        fleet: Engines and models.
        prompts: Held-out prompts.
        decode: Converts token ids of a response to text.
        composer: Combines the sources of rewards.
    """

    def __init__(
        self,
        config: PipelineConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: Composer,
    ) -> None:
        # `model_copy` does not validate: an algorithm that compares samples of a prompt needs two of them.
        self._ppo = config.ppo.model_copy(update={"samples_per_prompt": 1})
        self._fleet = fleet
        self._prompts = list(prompts)
        self._groups = list(map(group_of, prompts))
        self._decode = decode
        self._against = None
        if comparing_sources(config.ppo.rewards):
            if isinstance(composer, DecodedElsewhere):
                composer = composer.composer  # the controller decodes these few responses
            assert isinstance(composer, RewardComposer)
            composer = self._against = AgainstSFT(composer)
        seed = derive_seed(config.run.seed, "ppo", "evaluation")
        self._collector = Collector(self._ppo, fleet, self._prompts, decode, composer, seed)
        self._gold_known = has_gold(self._prompts)
        # State of a checkpoint: an attempt that continues does not sample the SFT model again.
        self._sft_scores: list[float] = []
        """(n,) by the measure that decides wins."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"sft_scores": self._sft_scores}
        if self._against is not None:
            state["sft_responses"] = self._against.responses
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sft_scores = [float(score) for score in state["sft_scores"]]
        if self._against is not None:
            self._against.responses = list(state["sft_responses"])

    def evaluate(self, version: int) -> HeldOutResult:
        """Evaluate policy `version`, which the engines hold.

        With `ppo.engine.sleep_level` the engines sleep afterwards, and need a sync before they sample again.
        """
        self._fleet.turns.sample()
        batch = self._collector.sample(self._prompts, version, 0, version)
        self._fleet.turns.train()
        columns, texts, usage = self._measure(batch)
        scores = columns.get("judge", columns["score"])
        # Before the first step, the policy is the SFT model.
        if version == 0:
            self._sft_scores = scores
        metrics = {f"eval/{name}": value for name, value in _means(columns).items()}
        metrics |= {f"eval/rewards/{name}": value for name, value in usage.items()}
        if "judge" in columns:
            metrics |= self._agreement(columns)
        price = self._ppo.kl.coef
        # By the configured coefficient, also if the KL controller has another one: versions must be
        # comparable.
        metrics[OBJECTIVE] = _mean(scores) - price * metrics[KL]
        for name in ("score", "reward_model", "judge"):
            if name in columns:
                metrics[f"eval/{name}_error"] = _standard_error(columns[name], self._groups)
        if "reward_model" in columns and "judge" in columns:
            both = columns["reward_model"], columns["judge"], self._groups
            metrics[CORRELATION], metrics[CORRELATION_ERROR] = correlation(*both)
            metrics["eval/judge_rank_correlation"], _ = correlation(*both, of_ranks=True)
        columns_and_wins = columns | {"win_rate": list(map(_win, scores, self._sft_scores))}
        metrics["eval/win_rate"] = _mean(columns_and_wins["win_rate"])
        metrics[DIVERSITY] = _diversity(texts)
        for source, indices in self._by_source().items():
            means = _means(select(columns_and_wins, indices))
            means["distinct_2"] = _diversity([texts[i] for i in indices])
            metrics |= {f"eval/by_source/{source}/{name}": mean for name, mean in means.items()}
        # Other metrics that are not finite are left out. `Selection` reads the objective in any case.
        for name in list(metrics):
            if name != OBJECTIVE and not math.isfinite(metrics[name]):
                del metrics[name]
        objectives = [score - price * kl for score, kl in zip(scores, columns["kl"], strict=True)]
        return HeldOutResult(metrics, objectives, columns, self._groups)

    def _agreement(self, columns: Columns) -> dict[str, float]:
        """Return the share of prompts for which a language model that compares and the second reward model
        prefer the same response, of the policy and the SFT model. Ties count half.
        """
        wins = list(map(_win, columns["judge"], self._sft_scores))
        metrics = {}
        for source in comparing_sources(self._ppo.rewards):
            name = source.used_name
            if source.compare != "scores":  # a grade does not say which one is preferred
                both = zip(columns[f"rewards/{name}"], wins, strict=True)
                agreement = [_win((value - 0.5) * (win - 0.5), 0.0) for value, win in both]
                metrics[f"eval/rewards/{name}/judge_agreement"] = _mean(agreement)
        return metrics

    def _measure(self, batch: RolloutBatch) -> tuple[Columns, list[str], dict[str, float]]:
        """Return the columns of all measures, the texts of the responses, and what the rewards cost."""
        fleet, ppo = self._fleet, self._ppo
        # Both are started before the rewards, so that ranks compute while reward sources are asked.
        policy = fleet.logprobs("policy", batch, with_entropy=False)
        reference = fleet.logprobs("reference", batch, with_entropy=False)
        rewards = self._collector.rewards(batch)
        # As for `objective/net_score`: without normalization over the batch, so that versions are comparable.
        total = weighted_sum(ppo.rewards, rewards.by_source, len(batch), ppo.score_clip, normalized=False)
        columns = {
            "score": shaped_scores(batch.lengths_B, batch.finished_B, total, ppo).tolist(),
            "length": list(map(float, batch.lengths_B)),
            "eos_rate": list(map(float, batch.finished_B)),
        }
        for name, values in rewards.by_source.items():
            columns[f"rewards/{name}"] = list(values)
        for source in ppo.rewards:
            if source.type == "model":
                # Without weight and penalties, in the unit of the judge's score.
                columns["reward_model"] = list(rewards.by_source[source.used_name])
        if rewards.ensemble_std:
            columns["ensemble_std"] = rewards.ensemble_std
        if "judge" in fleet.groups:
            columns["judge"] = fleet.scores(batch, "judge").gather().values
        pairs = zip(policy.gather("logprobs"), reference.gather("logprobs"), strict=True)
        # In float64, because most of both values cancels.
        columns["kl"] = [float((new.astype("f8") - ref.astype("f8")).sum()) for new, ref in pairs]
        inputs = list(RewardInputs(fleet, batch, self._decode))
        if self._gold_known:
            columns["gold"] = score_gold(inputs)
        return columns, [sample.response for sample in inputs], rewards.usage_metrics()

    def _by_source(self) -> dict[str, list[int]]:
        """Return the indices of the prompts of each data source; nothing if there is only one."""
        indices: dict[str, list[int]] = {}
        for i, prompt in enumerate(self._prompts):
            indices.setdefault(prompt.source or "unnamed", []).append(i)
        return dict(sorted(indices.items())) if len(indices) > 1 else {}


def _win(score: float, sft_score: float) -> float:
    """Return the preference for the policy's answer; NaN if a score is masked."""
    return math.nan if math.isnan(score + sft_score) else preference(score, sft_score)


def _means(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: _mean(values) for name, values in columns.items()}


def _diversity(texts: list[str]) -> float:
    return distinct_n({"policy": texts}, 2)["policy"]


def _standard_error(values: Sequence[float], groups: Sequence[str]) -> float:
    """Return the standard error of the mean over groups of prompts; NaN with fewer than two values."""
    present = [index for index, value in enumerate(values) if not math.isnan(value)]
    if len(present) < 2:
        return math.nan
    known, of_known = [values[index] for index in present], [groups[index] for index in present]
    return statistics.stdev(known) / math.sqrt(effective_count(known, of_known))


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    present = [value for value in values if not math.isnan(value)]
    return math.fsum(present) / len(present) if present else math.nan


# -- the files that are published --
#
#   logprob_gap      mean |log p(training process) - log p(trained files)| over response tokens
#   logprob_update   mean |log p(trained files) - log p(SFT model)|: the effect of training
#   logprob_change   mean |log p(training process) - log p(SFT model)|
#   loss             mean |log p(trained files) - log p(evaluated files)| / update
#   merge_loss       the same for `policy/`, the merge, if it is rounded to the lower precision of training
#                    and engines
#
# Trained files are the SFT model and the adapter, which are not rounded. Evaluated files are described in
# `policy_files`. `logprob_update`, `loss` and `merge_loss` use models that this process loads, with the same
# batches, so that rounding of sums does not count as a loss.


log = logging.getLogger(__name__)

SEQUENCES = 64
"""Number of responses for the measurement."""

_ROUNDING = 1e-5
"""Smaller gaps are caused by the order of float32 sums."""

_ROUNDING_16_BIT = 0.02
"""Smaller gaps between two processes can be caused by different batches and kernels in 16 bits."""
# The same number is the limit of the canary outside float32 (`ppo.watching.step_checks`).
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
    """Compare the files of a run with an adapter with the policy that it trained, see above. Returns the
    measures as `published/...`.

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
            # In the precision of the engines, so that the merged files differ by the merge alone.
            exact = loaded if served == dtype else logprobs_of(files, served)
        untrained = logprobs_of(PolicyFiles(sft / "model"), served)
        update = mean_gap(exact, untrained)
        merged_logprobs = logprobs_of(PolicyFiles(ppo / "policy"), served)
        # Relative: a fixed number of nats can be negligible, or most of the update (decision 18).
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
