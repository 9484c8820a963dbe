"""Scores of sampled responses by each measure, and the KL of the policy to the SFT model.

Only one model is in memory at a time: in this process, or on the ranks of `evaluate.ranks`
(`evaluation.rank_scoring`).

Scores with exchanged prompts show how much a score depends on the prompt: every item is scored against the
prompt of another item. If a policy or a reward model uses its prompts, the result is lower. If it does not,
or if a bug assigns responses to the wrong prompts, there is no difference.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.ranks import needs_actors
from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import result_settings
from rlhf_core.config.rewards import AnyReward, GoldReward, LanguageModelReward, ModelReward
from rlhf_core.data.synthetic import VERSION, parse_prompt
from rlhf_core.errors import ConfigError, NonFiniteError
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.evaluation.rank_scoring import logprobs_of_rank, on_ranks, scores_of_rank
from rlhf_core.evaluation.summary import ByModel, Intervals
from rlhf_core.pipeline import PolicyStage, StageName
from rlhf_core.rewards.compose import RewardBatch, RewardComposer
from rlhf_core.rewards.rules import gold
from rlhf_core.system.heartbeat import heartbeat, idle
from rlhf_core.system.home import Home
from rlhf_core.types import (
    ArtifactRef,
    PairExample,
    PromptAndResponse,
    PromptExample,
    RewardInput,
    StageContext,
)

if TYPE_CHECKING:
    from torch import Tensor

MODEL_STAGES: dict[str, StageName] = {"judge_model": "judge", "reward_model": "reward"}
"""Measures that are scores of a trained model, with the stage of the model."""


def rule_sources(config: PipelineConfig) -> tuple[AnyReward, ...]:
    """Return the sources of `ppo.rewards` that need no reward model.

    A gold reward with weight 0 is not included, because evaluation measures the gold reward anyway.
    """
    sources = []
    for source in config.ppo.rewards:
        is_measured = isinstance(source, GoldReward) and source.weight == 0
        if not isinstance(source, ModelReward) and not is_measured:
            sources.append(source)
    return tuple(sources)


def has_gold(prompts: Sequence[PromptExample | RewardInput]) -> bool:
    """Return whether every prompt belongs to the synthetic task, whose true reward is known."""
    return bool(prompts) and all(parse_prompt(prompt.prompt) is not None for prompt in prompts)


def choose_measure(config: PipelineConfig, *, gold_known: bool) -> str:
    """Return the measure that decides wins: `language_model`, `gold`, `judge_model`, `reward_model` or
    `rules`.

    Raises:
        ConfigError: `evaluate.judge` names a measure that this run does not have.
    """
    # In the order in which `auto` chooses.
    # A language model first: nobody configures one that is not to judge (decision 8).
    possible = {
        "language_model": config.evaluate.language_model is not None,
        "gold": gold_known,
        "judge_model": config.reward.judge is not None,
        "reward_model": config.reward.enabled,
        "rules": any(source.weight for source in rule_sources(config)),
    }
    available = [name for name, exists in possible.items() if exists]
    wanted = config.evaluate.judge
    if wanted == "auto" and available:
        return available[0]
    if wanted in available:
        return wanted
    raise ConfigError(
        f"evaluate.judge must name a judge that this run has; got {wanted}; use"
        f" {' or '.join(['auto', *available])} (language_model needs evaluate.language_model, gold the"
        " synthetic task, judge_model reward.judge, reward_model a trained reward model, rules a rule of some"
        " weight in ppo.rewards)"
    )


def judge_name(config: PipelineConfig, measure: str) -> str:
    """Return the human-readable name of a judge: a language model has its own."""
    settings = config.evaluate.language_model
    if measure == "language_model" and settings is not None:
        return f"language model {settings.name}"
    return measure.replace("_", " ")


def judge_digests(
    config: PipelineConfig,
    *,
    gold_known: bool,
    reward_code: Mapping[str, str],
    inputs: Mapping[StageName, ArtifactRef],
) -> dict[str, str]:
    """Return the digests of all judges of scores that this run has. Only numbers with equal digests are
    comparable.

    Args:
        config: Configuration of the run.
        gold_known: Whether the true reward is known.
        reward_code: Digests of the code of Python rewards, as in `RewardComposer`. The digest of `rules`
            covers it and the settings that change a value, but not the service behind an address.
        inputs: Artifacts of the run. The digest of a reward model is that of its artifact.
    """
    digests = {name: inputs[stage].digest for name, stage in MODEL_STAGES.items() if stage in inputs}
    # Not of the run but of the task: its true reward changes with the code only.
    if gold_known:
        digests["gold"] = f"synthetic-{VERSION}"
    if sources := rule_sources(config):
        rules = []
        for source in sources:
            code = reward_code.get(source.used_name)
            rules.append({"settings": result_settings(source), "code": code})
        digests["rules"] = hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()
    return digests


def trained_on(config: PipelineConfig, measure: str) -> bool:
    """Return whether the policy was trained with `measure`: its reward contains it, or the judge has labelled
    data of its training. If so, a win by this measure is not independent evidence.
    """
    labels = {source.labelled_by for source in (*config.data.sft, *config.data.preference)}
    if measure == "judge_model":
        return measure in labels
    kind = {"gold": GoldReward, "reward_model": ModelReward}.get(measure)
    # A source with the weight 0 is only measured, and trains nothing.
    used = [source for source in config.ppo.rewards if source.weight]
    judge = config.evaluate.language_model
    if measure == "language_model":
        models = {source.model for source in used if isinstance(source, LanguageModelReward)}
        return measure in labels or (judge is not None and judge.model in models)
    if kind is not None:
        return any(isinstance(source, kind) for source in used)
    return any(not isinstance(source, ModelReward) for source in used)


def dpo_trained_on(config: PipelineConfig, measure: str) -> bool:
    """Return the same for the policy of DPO: the judge has labelled data of its training, or is the reward
    model, which was trained with the same pairs.
    """
    labels = {source.labelled_by for source in (*config.data.sft, *config.data.preference)}
    return measure == "reward_model" or measure in labels


def policy_trained_on(config: PipelineConfig, policy: PolicyStage, measure: str) -> bool:
    """Return whether `measure` is no independent judge of the policy of PPO or DPO."""
    return (trained_on if policy == "ppo" else dpo_trained_on)(config, measure)


def score_rules(
    config: PipelineConfig,
    sources: tuple[AnyReward, ...],
    samples: Sequence[RewardInput],
    reward_code: Mapping[str, str] | None = None,
) -> RewardBatch:
    """Score all samples with all sources at once, so that batch normalisation treats the responses of both
    models alike.

    `reward_code` is described in `RewardComposer`. Replies of language models are kept in `run.home`.
    """
    with RewardComposer(sources, reward_code, replies=Home.of(config.run.home).judge) as composer:
        return composer.score(samples, None)


def score_as_ppo(
    config: PipelineConfig,
    samples: Sequence[RewardInput],
    model_scores: Sequence[float] | None,
    reward_code: Mapping[str, str] | None = None,
) -> list[float]:
    """Return the (n,) scores that PPO would give, as one batch and without penalties and KL. NaN where a
    source failed and its failure is masked.

    Args:
        config: Configuration of the run.
        samples: (n,) prompts and responses.
        model_scores: (n,) scores of the reward model; None without one.
        reward_code: As in `RewardComposer`.
    """
    ppo, replies = config.ppo, Home.of(config.run.home).judge
    with RewardComposer(ppo.rewards, reward_code, score_clip=ppo.score_clip, replies=replies) as composer:
        return composer.score(samples, model_scores).total


def score_gold(samples: Sequence[RewardInput]) -> list[float]:
    """Return the (n,) true rewards of the synthetic task."""
    return list(map(gold, samples))


@dataclass(frozen=True)
class ResponseScorer:
    """Scores responses with models."""

    config: PipelineConfig
    pad_id: int
    """Padding token."""
    device: str
    """Device of the models: "cpu" or "cuda"."""
    context: StageContext | None = None
    """Context of the stage, for ranks in other processes; None outside a stage."""

    def score(
        self,
        measure: str,
        reward: Path | None,
        samples: Sequence[RewardInput],
        reward_code: Mapping[str, str] | None = None,
    ) -> list[float]:
        """Return the (n,) values of one measure.

        Args:
            measure: A result of `choose_measure`.
            reward: Folder of the reward model or of the judge, if it is the measure.
            samples: (n,) prompts and responses.
            reward_code: Digests of the code of Python rewards, as in `RewardComposer`.
        """
        if measure == "gold":
            return score_gold(samples)
        if measure == "rules":
            return list(score_rules(self.config, rule_sources(self.config), samples, reward_code).total)
        assert reward is not None
        return self.reward_model(MODEL_STAGES[measure], reward, samples)

    def reward_model(self, stage: StageName, folder: Path, samples: Sequence[RewardInput]) -> list[float]:
        """Return the (n,) scores of the model of `stage` in `folder`, normalised by its statistics, in the
        precision of its training. An ensemble has one model in memory at a time; its folder combines scores.
        """
        from rlhf_core.models.scoring import combined, load_ensemble, member_folders

        pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]
        scorer = self
        if stage == "judge":
            judge = self.config.reward.of_judge
            scorer = replace(self, config=self.config.model_copy(update={"reward": judge}))
        by_member = [scorer._member(member, pairs) for member in member_folders(folder)]
        return combined(load_ensemble(folder), by_member)

    def _member(self, folder: Path, pairs: Sequence[PromptAndResponse]) -> list[float]:
        """Return the scores of one reward model, computed by ranks or in this process."""
        # Here, because the preflight imports this module, and needs no torch.
        from rlhf_core.models.score import load_score_model
        from rlhf_core.models.scoring import sequence_scores, single_process_batches

        config = self.config
        if needs_actors(config.evaluate.ranks):
            found: list[float] = on_ranks(
                scores_of_rank, config, self.device, self.context, folder, pairs, self.pad_id
            )
            return found
        heartbeat("load the reward model", config.run.timeouts.start)
        model = load_score_model(
            folder,
            dtype=config.reward.deepspeed.dtype,
            attention=config.model.attention,
            device=self.device,
            pack=config.reward.pack,
        ).eval()
        batches = single_process_batches(model, pairs, config.ppo.micro_batch_tokens, self.pad_id)
        scores = sequence_scores(model, model.statistics, batches)
        del model
        _free(self.device)
        return scores

    def policy_kl(self, policy: PolicyFiles, reference: Path, samples: Sequence[RewardInput]) -> list[float]:
        """Return the (n,) log-ratios of policy and reference, summed over the tokens of each response.

        Their mean over samples of the policy estimates KL(policy || reference) at the evaluation temperature,
        in nats per response.

        Args:
            policy: Files of the policy.
            reference: Model folder of the SFT model.
            samples: (n,) responses that the policy sampled.

        Raises:
            NonFiniteError: A log-ratio is NaN or infinite. The message has its prompt.
        """
        pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]
        temperature = self.config.evaluation_temperature
        new_logprobs = self.logprobs(policy, pairs, temperature)
        ref_logprobs = self.logprobs(PolicyFiles(reference), pairs, temperature)
        values: list[float] = []
        for new, ref, sample in zip(new_logprobs, ref_logprobs, samples, strict=True):
            # Summed in float64: a sum over a long response would round off the difference of similar
            # policies.
            values.append(float((new - ref).double().sum()))
            if not math.isfinite(values[-1]):
                raise NonFiniteError(
                    f"the log-ratio of policy and SFT model for prompt {sample.prompt_id} is {values[-1]},"
                    " but must be finite"
                )
        return values

    def logprobs(
        self,
        files: PolicyFiles,
        pairs: Sequence[PromptAndResponse],
        temperature: float,
        dtype: str | None = None,
    ) -> list[Tensor]:
        """Return the log-probabilities of each response's tokens, (T,) each.

        Args:
            files: Files of the model.
            pairs: Tokens of prompts and responses.
            temperature: Sampling temperature that the logits are divided by.
            dtype: Precision of the model. None is the precision of the policy's training.
        """
        from rlhf_core.models.adapters import load_adapter
        from rlhf_core.models.policy import load_policy
        from rlhf_core.models.scoring import sequence_logprobs, single_process_batches

        config = self.config
        dtype = dtype or config.ppo.policy_deepspeed.dtype
        if needs_actors(config.evaluate.ranks):
            found: list[Tensor] = on_ranks(
                logprobs_of_rank, config, self.device, self.context,
                files, pairs, temperature, self.pad_id, dtype,
            )  # fmt: skip
            return found
        heartbeat("load a policy", config.run.timeouts.start)
        model = load_policy(
            files.model,
            dtype=dtype,
            attention=config.model.attention,
            device=self.device,
            pack=config.ppo.pack,
            head_dtype=config.model.head_dtype,
        )
        if files.adapter is not None:
            load_adapter(model, files.adapter)
        batches = single_process_batches(model.eval(), pairs, config.ppo.micro_batch_tokens, self.pad_id)
        values, _ = sequence_logprobs(model, batches, temperature)
        del model
        _free(self.device)
        return values


def _free(device: str) -> None:
    idle()
    # `del` alone does not free tensors in reference cycles, and the next model is loaded at once.
    gc.collect()
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def exchange(prompts: Sequence[str]) -> list[int] | None:
    """Return for each item the index of the item whose prompt it gets, (n,): a permutation, the same on every
    call.

    No item gets a prompt equal to its own. Returns None if that is impossible, because more than half of the
    items have the same prompt.
    """
    count = len(prompts)
    if count < 2:
        return None
    largest = Counter(prompts).most_common(1)[0][1]
    if 2 * largest > count:
        return None
    # Equal prompts are adjacent, and the order is otherwise arbitrary. In alphabetical order, neighbours
    # would be similar.
    order = sorted(range(count), key=lambda i: (hashlib.sha256(prompts[i].encode()).digest(), i))
    partner = [0] * count
    for position, item in enumerate(order):
        # A shift by the size of the largest group leaves every group of equal prompts.
        partner[item] = order[(position + largest) % count]
    return partner


def exchange_pairs(pairs: Sequence[PairExample]) -> list[PairExample] | None:
    """Return the pairs with exchanged prompts, or None if `exchange` returns None."""
    partner = exchange([pair.prompt for pair in pairs])
    if partner is None:
        return None
    exchanged = []
    for pair, i in zip(pairs, partner, strict=True):
        other = pairs[i]
        exchanged.append(
            replace(pair, prompt_id=other.prompt_id, prompt=other.prompt, prompt_ids=other.prompt_ids)
        )
    return exchanged


def exchanged_gold(
    responses: Mapping[str, Sequence[RewardInput]], interval: Intervals
) -> dict[str, Any] | None:
    """Return the mean gold reward of each model with exchanged prompts and its interval. None if `exchange`
    returns None.
    """
    by_model: ByModel = {}
    for model, samples in responses.items():
        partner = exchange([sample.prompt for sample in samples])
        if partner is None:
            return None
        exchanged = []
        for sample, i in zip(samples, partner, strict=True):
            exchanged.append(replace(sample, prompt=samples[i].prompt))
        by_model[model] = score_gold(exchanged)
    return interval.by_model("gold_exchanged", by_model, interval.groups(samples))
