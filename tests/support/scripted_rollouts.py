"""Engines, rewards and a collector of rollouts of a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from rlhf_core.cluster.rpc import Pending, RemoteActor
from rlhf_core.config import PipelineConfig
from rlhf_core.config.load import config_from_tree
from rlhf_core.config.placement import Role
from rlhf_core.engines.sync.sender import SyncReport
from rlhf_core.ppo.sampling.rollouts import Collector
from rlhf_core.ppo.training.batch import (
    ModelScores,
    RolloutBatch,
    RolloutColumns,
    RolloutHeader,
    SentShare,
    columns_of,
    header_of,
)
from rlhf_core.rewards.compose import RewardBatch
from rlhf_core.types import PromptExample, RewardInput, Rollout
from tests.support.scripted_actors import local_actor
from tests.support.scripted_fleet import ScriptedFleet, ScriptedRank

SEED, VERSION, PLACES, SAMPLES = 7, 5, 4, 2
PROMPTS = [PromptExample(f"p{i}", f"question {i}", (i,) * (1 + 3 * i % 7), {"answer": i}) for i in range(30)]
Asked = list[tuple[str, int]]
"""(prompt id, seed) of one round, in the order of the places."""


@dataclass(frozen=True)
class Request:
    """One call of `EngineActor.sample`."""

    prompts: Sequence[PromptExample]
    n: int
    max_new_tokens: int
    temperature: float
    seeds: Sequence[int]


class FixedEngines:
    """Answer at once, with tokens that follow from the index of the sample and the seed."""

    def __init__(self, serving: Sequence[int] = (0,)) -> None:
        self.serving = list(serving)
        self.calls: list[dict[int, Request]] = []
        """The requests of each round, by engine."""
        self.lost: set[int] = set()
        """Engines that do not answer the next call."""
        self.dead: set[int] = set()
        """Engines that did not answer. A sync gives them up."""
        self.stale: tuple[int, int] | None = None
        """(call, engine) that holds the previous version."""
        self.cut: set[int] = set()
        """Indices of the samples that the length limit cuts."""

    def actor(self, index: int) -> RemoteActor[Any]:
        assert index in self.serving

        def sample(chunks: Sequence[Sequence[PromptExample]], **options: Any) -> list[Any]:
            request = Request([prompt for chunk in chunks for prompt in chunk], **options)
            answer = self._answer(index, request)
            sizes = [len(chunk) * request.n for chunk in chunks]
            columns = [
                columns_of(answer[end - size : end], request.n)
                for size, end in zip(sizes, accumulate(sizes), strict=True)
            ]
            return [(request, header_of(answer)), *columns]

        return local_actor(SimpleNamespace(sample=sample))

    def collect(self, pending: Mapping[int, Pending[Any]], _what: str) -> dict[int, RolloutHeader]:
        lost, self.lost = self.lost, set()
        self.dead |= lost
        self.calls.append({engine: call.reference.result()[0] for engine, call in pending.items()})
        return {engine: call.reference.result()[1] for engine, call in pending.items() if engine not in lost}

    def give_up(self) -> None:
        self.serving = [index for index in self.serving if index not in self.dead]

    def _answer(self, engine: int, request: Request) -> list[Rollout]:
        version = VERSION - (self.stale == (len(self.calls), engine))
        return [
            Rollout(p.prompt_id, k, p.input_ids, (k, seed % 9973), (-1.0, -1.0), k not in self.cut, version)
            for p, seed in zip(request.prompts, request.seeds, strict=True)
            for k in range(request.n)
        ]

    @property
    def rounds(self) -> list[Asked]:
        """Prompts and seeds of a single engine, which gets all prompts in order."""
        return [
            [(p.prompt_id, s) for p, s in zip(call[0].prompts, call[0].seeds, strict=True)]
            for call in self.calls
        ]


class FixedFleet(ScriptedFleet):
    """A fleet with engines of a script."""

    def __init__(
        self,
        config: PipelineConfig,
        engines: FixedEngines,
        ranks: Mapping[Role, Sequence[ScriptedRank]] | None,
    ) -> None:
        super().__init__(config, ranks=ranks)
        pool: Any = engines
        self.engines = pool
        self._script = engines
        self.waits: list[str] = []
        """What was waited for."""

    @override
    def wait(self, pending: Sequence[Pending[Any]], what: str) -> list[Any]:
        self.waits.append(what)
        return super().wait(pending, what)

    @override
    def sync(self, version: int) -> SyncReport:
        """Give up lost engines."""
        self._script.give_up()
        self.synced.append(version)
        return SyncReport(version, tensors=1, bytes=1, seconds=1.0)


def rollouts(batch: RolloutBatch) -> list[Rollout]:
    """Return the rows of a batch."""
    made = []
    for index, ((number, row), prompt) in enumerate(zip(batch.places, batch.prompts, strict=True)):
        chunk: RolloutColumns = batch.chunks[number].reference.result()
        response = tuple(chunk.response(row).tolist())
        assert len(response) == batch.lengths_B[index]
        made.append(
            Rollout(
                prompt.prompt_id,
                row % chunk.samples,
                tuple(chunk.prompt(row).tolist()),
                response,
                tuple(chunk.rollout_logprobs(row).tolist()),
                bool(batch.finished_B[index]),
                VERSION,
            )
        )
    return made


def mark(response_ids: Sequence[int]) -> float:
    """A number of this response alone, which float32 holds."""
    return response_ids[1] + response_ids[0] / 4


class MarkRewards:
    """Three sources: the response's mark, its double, and what counts: the mark, but `values` by round, place
    and sample.
    """

    def __init__(self, *values: Mapping[int, Sequence[float]]) -> None:
        self._values = values
        self.batches: list[list[RewardInput]] = []
        self.model_scores: Sequence[float] | None = None

    def score(self, batch: Sequence[RewardInput], model_scores: Sequence[float] | None) -> RewardBatch:
        values = self._values[len(self.batches)] if len(self.batches) < len(self._values) else {}
        self.batches.append(list(batch))
        self.model_scores = model_scores
        marks = [mark(sample.response_ids) for sample in batch]
        total = list(marks)
        for prompt, scores in values.items():
            total[prompt * SAMPLES : (prompt + 1) * SAMPLES] = scores
        values_of = {"mark": marks, "double": [2 * m for m in marks], "value": total}
        return RewardBatch(list(total), values_of, {"value": {"requests": float(len(batch))}})

    def total(self, by_source: Mapping[str, Sequence[float]], count: int) -> list[float]:
        assert len(by_source["value"]) == count
        return list(by_source["value"])


def alike(*places: int) -> dict[int, Sequence[float]]:
    return dict.fromkeys(places, (0.5,) * SAMPLES)


def collector(
    engines: FixedEngines,
    rewards: MarkRewards | None = None,
    *,
    rounds: int = 0,
    seed: int = SEED,
    ranks: Mapping[Role, Sequence[ScriptedRank]] | None = None,
    **changed: Any,
) -> Any:
    """`rounds`: of dynamic filtering, 0 for none."""
    prompts = changed.pop("prompts", PROMPTS)
    composer: Any = rewards or MarkRewards()
    tree: dict[str, Any] = {"algorithm": "grpo", "prompts_per_step": PLACES, "samples_per_prompt": SAMPLES}
    tree |= {
        "minibatches": 1,
        "score_clip": None,
        "dynamic_filtering": {"max_rounds": rounds} if rounds else None,
        **changed,
    }
    config = config_from_tree({"ppo": tree}, "test")
    fleet = FixedFleet(config, engines, ranks)
    return Collector(config.ppo, fleet, prompts, lambda ids: f"text {ids}", composer, seed)


class MarkRank(ScriptedRank):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @override
    def scores(self, role: str, share: SentShare | int, *chunks: RolloutColumns) -> ModelScores:
        assert role == "reward"
        self.calls += 1
        batch = self.received(share, chunks)
        assert sorted(chain(*batch.share.micro_batches)) == list(range(len(batch.share.places)))
        return ModelScores([mark(response.tolist()) for response in batch.tokens()[1]])
