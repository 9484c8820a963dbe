"""Rollouts of a PPO step, with their rewards where these decide which prompts are used.

    prompts -> engines -> rollouts                                        default
    prompts -> engines -> rollouts -> rewards -> groups that differ   dynamic filtering: rounds of new prompts
                 ^                                   | too few
                 +-----------------------------------+

Consumes the prompts of the data artifact; produces a `RolloutBatch`, which always has the same size. Waits
for all engines, and with filtering for the reward workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import WeightSyncError
from rlhf_core.ppo.engine_actor import EngineActor
from rlhf_core.ppo.experience import shaped_scores, uniform_groups
from rlhf_core.ppo.fleet import Fleet
from rlhf_core.rewards.compose import RewardBatch, RewardComposer, reward_inputs
from rlhf_core.seeds import derive_seed, permutation
from rlhf_core.types import PromptAndResponse, PromptExample, Rollout

log = logging.getLogger(__name__)


@dataclass
class RolloutBatch:
    """The samples of a prompt are consecutive."""

    rollouts: list[Rollout]
    prompts: list[PromptExample]
    """One per rollout."""
    rewards: RewardBatch | None = None
    """Already known if filtering needed them."""
    replaced: int = 0
    """Number of prompts that were replaced because all their samples had equal scores."""
    scores_before: float | None = None
    """Mean score with penalties of the first round, before any prompt was replaced.

    None without filtering.
    """
    from_cache: bool = False
    """Whether an earlier attempt sampled the batch."""

    @property
    def sequences(self) -> list[PromptAndResponse]:
        return [(r.prompt_ids, r.response_ids) for r in self.rollouts]


# -- which engine samples which prompt --


def prompts_of_step(count: int, per_step: int, seed: int, step: int) -> list[int]:
    """Return the indices of the prompts of PPO step `step` (1-based).

    The steps go through one permutation of all `count` prompts after another.
    """
    indices = []
    start = (step - 1) * per_step
    for position in range(start, start + per_step):
        epoch, offset = divmod(position, count)
        indices.append(permutation(count, derive_seed(seed, "prompts", epoch))[offset])
    return indices


def assign(lengths: Sequence[int], engines: int) -> list[list[int]]:
    """Return the prompt indices of each engine, ascending.

    The longest prompt goes first, each to the engine with the fewest tokens.
    """
    shares: list[list[int]] = [[] for _ in range(engines)]
    load = [0] * engines
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        engine = min(range(engines), key=lambda e: (load[e], e))
        shares[engine].append(i)
        load[engine] += lengths[i]
    return [sorted(share) for share in shares]


def reassign(shares: Mapping[int, Sequence[int]], serving: Sequence[int]) -> dict[int, list[int]]:
    """Return the engine for each share that must be sampled again.

    A share stays with its engine. The share of an engine that does not serve any more moves as a whole to the
    engine with the fewest prompts, because the same batch gives the same tokens.
    """
    kept = {engine: list(share) for engine, share in shares.items() if engine in serving}
    for engine, share in shares.items():
        if engine not in serving:
            target = min(serving, key=lambda e: (len(kept.get(e, ())), e))
            kept[target] = kept.get(target, []) + list(share)
    return kept


# -- sampling --


class Collector:
    """Samples and scores rollouts with a started fleet.

    Args:
        ppo: Section `ppo`.
        fleet: Engines and reward workers.
        prompts: All prompts.
        decode: Converts token ids of a response to text.
        composer: Combines the sources of rewards.
        seed: Of the stage.
    """

    def __init__(
        self,
        ppo: PPOConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: RewardComposer,
        seed: int,
    ) -> None:
        self._ppo = ppo
        self._fleet = fleet
        self._prompts = prompts
        self._decode = decode
        self._composer = composer
        self._seed = seed

    def collect(self, step: int, version: int) -> RolloutBatch:
        """Return the rollout batch of a step, sampled by policy `version`."""
        ppo = self._ppo
        used = prompts_of_step(len(self._prompts), ppo.prompts_per_step, self._seed, step)
        batch = self.sample([self._prompts[i] for i in used], step, 0, version)
        filtering = ppo.dynamic_filtering
        if filtering is None:
            return batch
        batch.rewards = self.rewards(batch)
        first_scores_B = shaped_scores(batch.rollouts, batch.rewards.total, ppo)
        batch.scores_before = first_scores_B.nanmean().item()
        for round_ in range(1, filtering.max_rounds + 1):
            uniform = uniform_groups(shaped_scores(batch.rollouts, batch.rewards.total, ppo), ppo)
            replacements = self._replacements(step, round_, len(uniform), used)
            if not replacements:
                break
            used += replacements
            new = self.sample([self._prompts[i] for i in replacements], step, round_, version)
            new.rewards = self.rewards(new)
            self._replace(batch, uniform[: len(replacements)], new)
        return batch

    def rewards(self, batch: RolloutBatch, model_scores: Sequence[float] | None = None) -> RewardBatch:
        """Return the composed scores.

        `model_scores` are the scores of the reward model. If it is used and they are None, it is called here.
        """
        if model_scores is None and "reward" in self._fleet.groups:
            model_scores = self._fleet.retry_after_restart(
                lambda: self._fleet.scores(batch.sequences).gather(list), "the scoring"
            )
        inputs = reward_inputs(self._decode, batch.prompts, batch.rollouts)
        return self._composer.score(inputs, model_scores)

    def sample(self, prompts: Sequence[PromptExample], step: int, round_: int, version: int) -> RolloutBatch:
        """Sample `samples_per_prompt` responses to each prompt on all engines at the same time.

        Raises:
            WeightSyncError: An engine sampled from another policy version.
        """
        # The index is part of the seed: a prompt that occurs twice in a step gets different responses.
        path = (step,) if round_ == 0 else (step, "round", round_)
        seeds = [derive_seed(self._seed, "rollout", *path, p.prompt_id, i) for i, p in enumerate(prompts)]
        by_prompt = self._generate(prompts, seeds, version, f"the rollouts of step {step}")
        rollouts = [rollout for i in range(len(prompts)) for rollout in by_prompt[i]]
        stale = {r.policy_version for r in rollouts} - {version}
        if stale:
            raise WeightSyncError(
                f"step {step} was sampled from policy version {sorted(stale)}, not {version}"
            )
        return RolloutBatch(rollouts, [p for p in prompts for _ in range(self._ppo.samples_per_prompt)])

    def _generate(
        self, prompts: Sequence[PromptExample], seeds: Sequence[int], version: int, what: str
    ) -> dict[int, list[Rollout]]:
        """Return the rollouts of each prompt, by its index.

        The share of an engine that is lost is sampled again as one batch, if possible by the engine that
        replaces it, so that the result is the same.
        """
        ppo, engines = self._ppo, self._fleet.engines
        shares = assign([len(p.input_ids) for p in prompts], len(engines.serving))
        remaining = {engine: share for engine, share in zip(engines.serving, shares, strict=True) if share}
        by_prompt: dict[int, list[Rollout]] = {}
        while remaining:
            calls: dict[int, Pending[list[Rollout]]] = {}
            for engine, share in remaining.items():
                calls[engine] = engines.actor(engine).call(
                    EngineActor.generate,
                    [prompts[i] for i in share],
                    n=ppo.samples_per_prompt,
                    max_new_tokens=ppo.max_new_tokens,
                    temperature=ppo.temperature,
                    seeds=[seeds[i] for i in share],
                )
            for engine, rollouts in engines.collect(calls, what).items():
                samples = iter(rollouts)
                for i in remaining.pop(engine):
                    by_prompt[i] = [next(samples) for _ in range(ppo.samples_per_prompt)]
            if remaining:
                self._fleet.sync(version)
                remaining = reassign(remaining, engines.serving)
        return by_prompt

    def _replacements(self, step: int, round_: int, count: int, used: Sequence[int]) -> list[int]:
        """Return the indices of up to `count` prompts that are not in `used`, the prompts of this step so
        far.
        """
        order = permutation(len(self._prompts), derive_seed(self._seed, "replacements", step, round_))
        excluded = set(used)
        return [i for i in order if i not in excluded][:count]

    def _replace(self, batch: RolloutBatch, groups: list[int], new: RolloutBatch) -> None:
        """Replace the given groups of `batch` by the groups of `new`, in order."""
        assert batch.rewards is not None and new.rewards is not None
        n = self._ppo.samples_per_prompt
        for source, target in enumerate(groups):
            old_rows, new_rows = slice(target * n, (target + 1) * n), slice(source * n, (source + 1) * n)
            batch.rollouts[old_rows] = new.rollouts[new_rows]
            batch.prompts[old_rows] = new.prompts[new_rows]
            for name, values in batch.rewards.by_source.items():
                values[old_rows] = new.rewards.by_source[name][new_rows]
        # All scores change if a source is normalized over the batch.
        batch.rewards.total[:] = self._composer.total(batch.rewards.by_source, len(batch.rollouts))
        batch.replaced += len(groups)


# -- rollouts of an interrupted step --


class RolloutCache:
    """The rollouts of the current step in a local file, for an attempt that is interrupted during this step.

    The next attempt continues from the checkpoint with the weights that sampled them, and uses them instead
    of sampling again, which on GPUs would not give the same tokens. Only the step after a checkpoint can be
    repeated in this way, so the file holds one step. It starts with a checksum and is replaced atomically.

    Args:
        folder: Local folder that outlives an attempt.
        prompts: All prompts, in the same order in each attempt.
    """

    def __init__(self, folder: Path, prompts: Sequence[PromptExample]) -> None:
        self._file = folder / "rollouts.json"
        self._prompts = prompts
        self._index = {id(prompt): i for i, prompt in enumerate(prompts)}

    def write(self, step: int, batch: RolloutBatch) -> None:
        """Store the batch of `step` and remove the batch of any other step."""
        content = json.dumps(
            {
                "step": step,
                "rollouts": [asdict(rollout) for rollout in batch.rollouts],
                "prompts": [self._index[id(prompt)] for prompt in batch.prompts],
                "rewards": None if batch.rewards is None else asdict(batch.rewards),
                "replaced": batch.replaced,
                "scores_before": batch.scores_before,
            }
        )
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}", encoding="utf-8")
        part.replace(self._file)

    def read(self, step: int) -> RolloutBatch | None:
        """Return the batch of `step`, or None if the file is missing, damaged, or holds another step."""
        try:
            checksum, content = self._file.read_bytes().split(b"\n", 1)
        except FileNotFoundError:
            return None
        except ValueError:
            checksum, content = b"", b""
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            log.error("%s is damaged; step %d is sampled again", self._file, step)
            return None
        fields = json.loads(content)
        if fields["step"] != step:
            return None
        return RolloutBatch(
            [_rollout(rollout) for rollout in fields["rollouts"]],
            [self._prompts[i] for i in fields["prompts"]],
            None if fields["rewards"] is None else RewardBatch(**fields["rewards"]),
            fields["replaced"],
            fields["scores_before"],
            from_cache=True,
        )


def _rollout(fields: dict[str, Any]) -> Rollout:
    """Return a rollout from its JSON fields, where tuples have become lists."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Rollout(**values)
