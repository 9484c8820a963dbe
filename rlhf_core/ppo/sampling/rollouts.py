"""Rollouts of a PPO step, with their rewards where these decide which prompts are used.

    prompts -> engines -> rollouts                                        default
    prompts -> engines -> rollouts -> rewards -> groups that differ   dynamic filtering: rounds of new prompts
                 ^                                   | too few
                 +-----------------------------------+

Consumes the prompts of the data artifact; produces a `RolloutBatch`, which always has the same size. Waits
for all engines, and with filtering for the reward workers. Between `start` and `finish` the engines sample,
and the controller can do something else.

The tokens stay in chunks (`ppo.training.batch`), to which the batch has references. They are fetched one
chunk at a time, and only for held-out evaluations, tables of samples, checkpoints with `ppo.staleness`, and
rewards that the controller asks. Responses that are read are views of their chunk, which stays in the object
store with them. The record and the comparison of engines and policy after a sync fetch all chunks of their
batch at once.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from rlhf_core.cluster.rpc import Pending
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.engines.vllm import SamplingOptions
from rlhf_core.errors import WeightSyncError, WorkerDied
from rlhf_core.ppo.fleet.engine_actor import EngineActor
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.training.batch import (
    FloatArray,
    ModelScores,
    Places,
    RolloutBatch,
    RolloutColumns,
    RolloutHeader,
)
from rlhf_core.ppo.training.experience import shaped_scores, uniform_groups
from rlhf_core.rewards.compose import RewardBatch, clipped_share, reward_input, weighted_sum
from rlhf_core.seeds import derive_seed, permutation
from rlhf_core.system.machine import machine
from rlhf_core.types import Numbers, PromptAndResponse, PromptExample, RewardInput

log = logging.getLogger(__name__)

T = TypeVar("T")

Chunk = tuple[int, ...]
"""Indices of prompts whose responses form one chunk."""

# A chunk is one object of Ray. Smaller ones cost more calls, and larger ones more memory where one is
# fetched.
_CHUNK_ROWS = 64
"""Largest number of responses in a chunk, if a prompt does not have more samples."""
_DECODING_THREADS = 8
"""Largest number of threads that decode. More would not help: a tenth of the work holds Python's lock."""
_CHUNKS_PER_RANK = 8
"""Chunks are smaller if there would be fewer for each rank, because a chunk is never divided."""


# -- which engine samples which prompt --


def prompts_of_step(count: int, per_step: int, seed: int, step: int, *, shuffled: bool = True) -> list[int]:
    """Return the indices of the prompts of PPO step `step` (1-based).

    The steps go through one permutation of all `count` prompts after another, or through 0..count-1 again and
    again.

    Args:
        count: Number of prompts.
        per_step: Prompts of a step.
        seed: Seed of the permutations.
        step: 1-based.
        shuffled: Whether the order is a permutation.
    """
    indices = []
    start = (step - 1) * per_step
    for position in range(start, start + per_step):
        epoch, offset = divmod(position, count)
        if shuffled:
            # For each position: `permutation` keeps the orders of the last epochs.
            offset = permutation(count, derive_seed(seed, "prompts", epoch))[offset]
        indices.append(offset)
    return indices


def assign(lengths: Sequence[int], engines: int) -> list[list[int]]:
    """Return the prompt indices of each engine, ascending.

    The longest prompt goes first, each to the engine with the fewest tokens.
    """
    shares: list[list[int]] = [[] for _ in range(engines)]
    loads = [(0, engine) for engine in range(engines)]
    # By the prompts, because the lengths of the responses, which take longer, are not known before.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # As in `batch._ranks_of_chunks`, with the number of the engine for equal loads, so that attempts
        # agree.
        load, engine = loads[0]
        shares[engine].append(i)
        heapq.heapreplace(loads, (load + lengths[i], engine))
    return [sorted(share) for share in shares]


def reassign(shares: Mapping[int, Sequence[T]], serving: Sequence[int]) -> dict[int, list[T]]:
    """Return the engine for each share that must be sampled again.

    A share is a list of chunks. It stays with its engine. The share of an engine that does not serve any more
    moves as a whole to the engine with the fewest chunks, because the same batch gives the same tokens.
    """
    kept = {engine: list(share) for engine, share in shares.items() if engine in serving}
    for engine, share in shares.items():
        if engine not in serving:
            # By the number of the engine if equal, so that another attempt would choose the same one.
            target = min(serving, key=lambda e: (len(kept.get(e, ())), e))
            kept[target] = kept.get(target, []) + list(share)
    return kept


def cut(share: Sequence[int], samples: int, rows: int) -> list[Chunk]:
    """Cut the prompts of an engine into chunks of about `rows` responses, `samples` to each prompt."""
    size = max(1, rows // samples)
    return [tuple(share[start : start + size]) for start in range(0, len(share), size)]


# -- sampling --


@dataclass
class Sampling:
    """Responses that the engines are sampling."""

    step: int
    prompts: Sequence[PromptExample]
    seeds: Sequence[int]
    version: int
    """Policy version of the engines."""
    ahead: bool
    """Whether the policy is trained in the meantime, so that its weights cannot be sent again."""
    numbers: Sequence[int] | None = None
    """See `RolloutBatch.numbers_B`."""
    remaining: dict[int, list[Chunk]] = field(default_factory=dict)
    """Chunks of each engine that are not sampled yet."""
    calls: dict[int, Pending[RolloutHeader]] = field(default_factory=dict)
    tokens: dict[int, list[Pending[RolloutColumns]]] = field(default_factory=dict)
    sampled: dict[Chunk, tuple[Pending[RolloutColumns], RolloutHeader]] = field(default_factory=dict)
    """Tokens and header of each chunk that is sampled."""


class Composer(Protocol):
    """Scores batches: `RewardComposer`, or, with other hosts, `RewardActors` or `DecodedElsewhere`."""

    def score(self, batch: RewardInputs, model_scores: Sequence[float] | None) -> RewardBatch: ...

    def total(self, by_source: Mapping[str, Sequence[float]], count: int) -> list[float]: ...


class Collector:
    """Samples and scores rollouts with a started fleet.

    Args:
        ppo: Section `ppo`.
        fleet: Engines and reward workers.
        prompts: All prompts.
        decode: Converts token ids of a response to text.
        composer: Combines the sources of rewards.
        seed: Seed of the stage.
    """

    def __init__(
        self,
        ppo: PPOConfig,
        fleet: Fleet,
        prompts: Sequence[PromptExample],
        decode: Callable[[Sequence[int]], str],
        composer: Composer,
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
        return self.finish(self.start(step, version))

    def start(self, step: int, version: int, *, ahead: bool = False) -> Sampling:
        """Let the engines sample the responses of a step.

        Args:
            step: Number of the step.
            version: Policy version that the engines have.
            ahead: Whether the policy is trained before `finish` is called.
        """
        numbers = self._drawn(step)
        prompts = [self._prompts[i] for i in numbers]
        return self._start(prompts, step, 0, version, ahead=ahead, numbers=numbers)

    def _drawn(self, step: int) -> list[int]:
        """Return the indices of the prompts of a step."""
        ppo, difficulty = self._ppo, self._ppo.difficulty
        shuffled = difficulty is None or difficulty.order == "shuffled"
        return prompts_of_step(len(self._prompts), ppo.prompts_per_step, self._seed, step, shuffled=shuffled)

    def finish(self, sampling: Sampling) -> RolloutBatch:
        """Wait for the responses of a step. With filtering, score them and replace groups.

        Raises:
            WeightSyncError: An engine sampled from another policy version.
            WorkerDied: Too few engines are left, or none that has the weights of `Sampling.version`.
        """
        ppo, step, version = self._ppo, sampling.step, sampling.version
        batch = self._finish(sampling)
        filtering = ppo.dynamic_filtering
        if filtering is None:
            return batch
        used = self._drawn(step)
        batch.rewards = self.rewards(batch)
        # Before any replacement: filtering keeps groups whose scores differ, so the final batch does not show
        # the mean score of the policy.
        first_scores_B = shaped_scores(batch.lengths_B, batch.finished_B, batch.rewards.total, ppo)
        batch.scores_before = first_scores_B.nanmean().item()
        for round_ in range(1, filtering.max_rounds + 1):
            scores_B = shaped_scores(batch.lengths_B, batch.finished_B, batch.rewards.total, ppo)
            uniform = uniform_groups(scores_B, ppo)
            replacements = self._replacements(step, round_, len(uniform), used)
            if not replacements:
                break
            used += replacements
            prompts = [self._prompts[i] for i in replacements]
            # The engines still have this version: the sync comes after `finish`.
            new = self._finish(
                self._start(prompts, step, round_, version, ahead=sampling.ahead, numbers=replacements)
            )
            new.rewards = self.rewards(new)
            self._replace(batch, uniform[: len(replacements)], new)
        return batch

    def rewards(self, batch: RolloutBatch, model_scores: ModelScores | None = None) -> RewardBatch:
        """Return the composed scores.

        `model_scores` are the scores of the reward model. If it is used and they are None, it is called here.
        """
        if model_scores is None and "reward" in self._fleet.groups:
            model_scores = self._fleet.scores(batch).gather()
        inputs = RewardInputs(self._fleet, batch, self._decode)
        if model_scores is None:
            return self._composer.score(inputs, None)
        rewards = self._composer.score(inputs, model_scores.values)
        return replace(rewards, ensemble_std=model_scores.deviations)

    def sample(self, prompts: Sequence[PromptExample], step: int, round_: int, version: int) -> RolloutBatch:
        """Sample `samples_per_prompt` responses to each prompt on all engines at the same time.

        Raises:
            WeightSyncError: An engine sampled from another policy version.
        """
        return self._finish(self._start(prompts, step, round_, version, ahead=False))

    def _start(
        self,
        prompts: Sequence[PromptExample],
        step: int,
        round_: int,
        version: int,
        *,
        ahead: bool,
        numbers: Sequence[int] | None = None,
    ) -> Sampling:
        """Let the engines sample the responses to these prompts."""
        # The index is part of the seed: a prompt that occurs twice in a step gets different responses.
        path = (step,) if round_ == 0 else (step, "round", round_)
        seeds = [derive_seed(self._seed, "rollout", *path, p.prompt_id, i) for i, p in enumerate(prompts)]
        sampling = Sampling(step, prompts, seeds, version, ahead, numbers)
        serving = self._fleet.engines.serving
        shares = assign([len(p.input_ids) for p in prompts], len(serving))
        for engine, share in zip(serving, shares, strict=True):
            # With more engines than prompts, some have none.
            if share:
                sampling.remaining[engine] = cut(
                    share, self._ppo.samples_per_prompt, self._chunk_rows(len(prompts))
                )
        self._send(sampling)
        return sampling

    def _chunk_rows(self, prompts: int) -> int:
        """Return the number of responses in a chunk of a batch of `prompts` prompts."""
        ranks = self._fleet.most_ranks
        # A single rank gets all chunks, so their number does not matter to it.
        if ranks == 1:
            return _CHUNK_ROWS
        return min(_CHUNK_ROWS, prompts * self._ppo.samples_per_prompt // (_CHUNKS_PER_RANK * ranks))

    def _send(self, sampling: Sampling) -> None:
        """Send the remaining chunks to their engines."""
        prompts = sampling.prompts
        # The calls of lost engines would be waited for again.
        sampling.calls.clear()
        for engine, chunks in sampling.remaining.items():
            call, tokens = self._fleet.engines.actor(engine).call_parts(
                1 + len(chunks),
                EngineActor.sample,
                [[prompts[i] for i in chunk] for chunk in chunks],
                seeds=[sampling.seeds[i] for chunk in chunks for i in chunk],
                **self._options,
            )
            sampling.calls[engine] = call
            sampling.tokens[engine] = tokens

    @property
    def _options(self) -> SamplingOptions:
        ppo = self._ppo
        return {
            "n": ppo.samples_per_prompt,
            "max_new_tokens": ppo.response_limit,
            "temperature": ppo.temperature,
        }

    def _finish(self, sampling: Sampling) -> RolloutBatch:
        """Wait for the responses. Raises WeightSyncError if an engine sampled from another policy version."""
        self._receive(sampling)
        step, sampled, n = sampling.step, sampling.sampled, self._ppo.samples_per_prompt
        # In the order of their prompts, so that the distribution over ranks does not depend on which engine
        # answered first.
        chunks = sorted(sampled)
        header = _in_order(chunks, [sampled[chunk][1] for chunk in chunks], n)
        wrong = set(header.versions.tolist()) - {sampling.version}
        if wrong:
            raise WeightSyncError(
                f"step {step} was sampled from policy version {sorted(wrong)}, not {sampling.version}"
            )
        return RolloutBatch(
            [sampled[chunk][0] for chunk in chunks],
            _places(chunks, n),
            header.lengths,
            header.finished,
            [p for p in sampling.prompts for _ in range(n)],
            version=sampling.version,
            # Seeds have 63 bits, so that int64 holds them (`seeds.derive_seed`).
            seeds_B=np.repeat(np.array(sampling.seeds, np.int64), n),
            numbers_B=None if sampling.numbers is None else np.repeat(np.array(sampling.numbers), n),
        )

    def _collect(self, sampling: Sampling) -> None:
        """Wait for the calls of the engines, and add what they have sampled. A lost engine adds nothing."""
        n, what = self._ppo.samples_per_prompt, f"the rollouts of step {sampling.step}"
        for engine, header in self._fleet.engines.collect(sampling.calls, what).items():
            chunks = sampling.remaining.pop(engine)
            start = 0
            for chunk, pending in zip(chunks, sampling.tokens[engine], strict=True):
                end = start + len(chunk) * n
                sampling.sampled[chunk] = (pending, header.rows(start, end))
                start = end

    def _receive(self, sampling: Sampling) -> None:
        """Wait until all responses are sampled.

        The share of an engine that is lost is sampled again as one batch, if possible by the engine that
        replaces it, so that the result is the same.
        """
        engines = self._fleet.engines
        while True:
            self._collect(sampling)
            if not sampling.remaining:
                return
            if not sampling.ahead:
                # Restarts the lost engines. The policy still has the weights of this version.
                self._fleet.sync(sampling.version)
            elif not engines.serving:
                # An engine that is restarted would get the weights of the next version.
                raise WorkerDied(
                    f"no engine is left with the weights of policy version {sampling.version}, from which"
                    f" step {sampling.step} is sampled (ppo.staleness={self._ppo.staleness})"
                )
            sampling.remaining = reassign(sampling.remaining, engines.serving)
            self._send(sampling)

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
        assert batch.seeds_B is not None and new.seeds_B is not None
        assert batch.numbers_B is not None and new.numbers_B is not None
        n = self._ppo.samples_per_prompt
        batch.filtered.append(batch.take((np.array(groups)[:, None] * n + np.arange(n)).reshape(-1)))
        batch.forget_distribution()
        new_objects = new.places.objects + len(batch.chunks)
        batch.chunks += new.chunks
        for source, target in enumerate(groups):
            old_rows, new_rows = slice(target * n, (target + 1) * n), slice(source * n, (source + 1) * n)
            # Can be written: `_places` and `_in_order` have copied what Ray returned, which is read-only.
            batch.places.objects[old_rows] = new_objects[new_rows]
            batch.places.rows[old_rows] = new.places.rows[new_rows]
            batch.lengths_B[old_rows] = new.lengths_B[new_rows]
            batch.finished_B[old_rows] = new.finished_B[new_rows]
            batch.prompts[old_rows] = new.prompts[new_rows]
            batch.seeds_B[old_rows] = new.seeds_B[new_rows]
            batch.numbers_B[old_rows] = new.numbers_B[new_rows]
            for name, values in batch.rewards.by_source.items():
                values[old_rows] = new.rewards.by_source[name][new_rows]
            batch.rewards.ensemble_std[old_rows] = new.rewards.ensemble_std[new_rows]
        batch.rewards.add_usage(new.rewards)
        # All scores change if a source is normalized over the batch.
        batch.rewards.total[:] = self._composer.total(batch.rewards.by_source, len(batch))
        batch.replaced += len(groups)


def _places(chunks: Sequence[Chunk], samples: int) -> Places:
    """Return chunk and row of each response, in the order of the prompts."""
    sizes = list(map(len, chunks))
    objects = np.repeat(np.arange(len(chunks)), sizes)
    rows = np.concatenate(list(map(np.arange, sizes)))
    order = np.argsort(np.concatenate(chunks))
    return Places(
        np.repeat(objects[order], samples),
        (rows[order, None] * samples + np.arange(samples)).reshape(-1),
    )


def _in_order(chunks: Sequence[Chunk], headers: Sequence[RolloutHeader], samples: int) -> RolloutHeader:
    """Return the headers of chunks as one header in the order of the prompts."""
    first_rows = np.argsort(np.concatenate(chunks)) * samples
    order = (first_rows[:, None] + np.arange(samples)).reshape(-1)
    return RolloutHeader(
        np.concatenate([header.lengths for header in headers])[order],
        np.concatenate([header.finished for header in headers])[order],
        np.concatenate([header.versions for header in headers])[order],
    )


# -- tokens, where they are needed --


def read_responses(fleet: Fleet, batch: RolloutBatch, rows: Sequence[int]) -> list[PromptAndResponse]:
    """Return the token ids of some responses of a batch and of their prompts. Each chunk is fetched once."""
    objects, places = batch.places.objects.tolist(), batch.places.rows.tolist()
    rows_of_chunk: dict[int, list[int]] = {}
    for row in rows:
        rows_of_chunk.setdefault(objects[row], []).append(row)
    by_row: dict[int, PromptAndResponse] = {}
    for number in sorted(rows_of_chunk):
        (columns,) = fleet.wait([batch.chunks[number]], "rollouts")
        for row in rows_of_chunk[number]:
            by_row[row] = batch.prompts[row].input_ids, Numbers(columns.response(places[row]))
    return [by_row[row] for row in rows]


def read_rollout_logprobs(fleet: Fleet, batch: RolloutBatch) -> list[FloatArray]:
    """Return the engines' log-probabilities (T,) of each response of a batch."""
    chunks = fleet.wait(batch.chunks, "rollouts")
    places = zip(batch.places.objects.tolist(), batch.places.rows.tolist(), strict=True)
    return [chunks[number].rollout_logprobs(row) for number, row in places]


def decoded(
    responses: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str], threads: int
) -> list[str]:
    """Return the texts of responses.

    Args:
        responses: (n,) token ids.
        decode: Converts token ids to text.
        threads: Limit of the threads that decode; 0: the cores of this host.
    """
    # The tokenizer releases Python's lock in its part of the work, nine tenths of it.
    with ThreadPoolExecutor(min(_DECODING_THREADS, threads or machine().cores())) as pool:
        return list(pool.map(decode, responses))


class RewardInputs(Sequence[RewardInput]):
    """The input of the reward sources for each response of a batch.

    Responses are fetched and decoded when the first one is read. The reward model reads none, and
    `RewardActors` passes references to them.
    """

    def __init__(self, fleet: Fleet, batch: RolloutBatch, decode: Callable[[Sequence[int]], str]) -> None:
        self._fleet = fleet
        self.batch = batch
        self._decode = decode
        self.texts: list[str] | None = None
        """Texts of the responses, if another process has decoded them."""
        self._inputs: list[RewardInput] | None = None

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def _all(self) -> list[RewardInput]:
        if self._inputs is None:
            batch = self.batch
            found = read_responses(self._fleet, batch, range(len(batch)))
            responses = [response_ids for _, response_ids in found]
            if self.texts is None:
                self.texts = decoded(responses, self._decode, self._fleet.settings.run.threads)
            self._inputs = list(
                map(reward_input, batch.prompts, responses, batch.finished_B.tolist(), self.texts)
            )
        return self._inputs


def reward_metrics(ppo: PPOConfig, batch: RolloutBatch, rewards: RewardBatch, kl: float) -> dict[str, float]:
    """Return the metrics of the rewards of a batch, and `objective/net_score`.

    Args:
        ppo: Section `ppo`.
        batch: The responses.
        rewards: Rewards of these responses.
        kl: Their mean KL to the reference, in nats per response.
    """
    metrics = {f"rewards/{name}": value for name, value in rewards.metrics().items()}
    clipped = clipped_share(ppo.rewards, rewards.by_source, ppo.score_clip)
    if clipped is not None:
        metrics["objective/score_clipfrac"] = clipped
    if ppo.dynamic_filtering is not None:
        metrics["rollout/replaced_prompts"] = float(batch.replaced)
        if batch.scores_before is not None:
            metrics["objective/scores_before_filtering"] = batch.scores_before
    # It must be comparable between steps, so scores are not normalized over the batch, and the KL counts with
    # the configured coefficient for every `kl.place`.
    scores = weighted_sum(ppo.rewards, rewards.by_source, len(batch), ppo.score_clip, normalized=False)
    mean_score = shaped_scores(batch.lengths_B, batch.finished_B, scores, ppo).nanmean().item()
    metrics["objective/net_score"] = mean_score - ppo.kl.coef * kl
    return metrics
