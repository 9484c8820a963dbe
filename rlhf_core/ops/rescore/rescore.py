"""`rlhf rescore`: what another reward would have said about the responses that PPO has recorded.

    record, data artifact -> tokens and text of a step -> reward model, `RewardComposer` -> file of the step
                                                                                               |
    annotation of the artifact of `ppo`, comparison with the run's reward <--- all steps ------+

A step is scored as one batch, as in PPO. A killed command has the files of its steps, and continues after
them. They are deleted when the annotation is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.config.keys import result_settings
from rlhf_core.config.load import load_rewards
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.rewards import AnyReward, ExternalReward, LanguageModelReward, ModelReward, PythonReward
from rlhf_core.data.dataset import load_prompts
from rlhf_core.data.tokenizer import load_decoder, load_tokenizer
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import InputError
from rlhf_core.ops.finished_run import FinishedRun
from rlhf_core.ops.rescore.comparison import Comparison, compare
from rlhf_core.ops.serve_reward import locate
from rlhf_core.record.annotations import annotate, check_name
from rlhf_core.record.reader import read_rollouts
from rlhf_core.record.schema import REWARD
from rlhf_core.rewards.check import function_file
from rlhf_core.rewards.compose import RewardComposer, reward_input
from rlhf_core.rewards.scorer import ItemError, Scorer
from rlhf_core.storage.bundles import hash_file
from rlhf_core.system.files import json_sha256, replacing
from rlhf_core.types import PromptExample, RewardInput

WRITER = "rescore"
_SHOWN_CHARACTERS = 200

Track = Callable[[Sequence[int]], Iterable[int]]
"""Returns the steps one after another, and shows how far they are."""


@dataclass(frozen=True)
class Rescored:
    """Another reward of recorded responses."""

    address: str
    """The annotation."""
    failed: int
    """Responses without a value."""
    impure: tuple[str, ...]
    """Sources whose values can differ if they are asked again."""
    comparison: Comparison


def rescore(
    run: FinishedRun,
    file: str,
    *,
    name: str | None = None,
    steps: Collection[int] | None = None,
    limit: int | None = None,
    against: str = "total",
    model: str | None = None,
    track: Track = iter,
) -> Rescored:
    """Score the recorded responses of a run with other rewards, write an annotation, and compare.

    Args:
        run: The run.
        file: YAML file with `rewards`, or Python file with a function `score`.
        name: Name of the annotation; None: that of the file.
        steps: Steps to score; None: all.
        limit: Prompts of each step, the first ones; None: all.
        against: Column of the record with the run's reward.
        model: Reward model of `type: model`: address of an artifact, or folder. None: that of the run.
        track: Shows the progress.

    Raises:
        InputError: Something that was given cannot be used, or the run has no record.
        RewardError: A source failed, and its `on_error` does not mask it.
    """
    rewards, name = load_rewards(file), check_name(name or Path(file).stem)
    if not any(source.weight for source in rewards):
        raise InputError(f"{file}: all sources have the weight 0; leave it out")
    artifacts, ref = run.artifact("ppo")
    folder = run.recorded("ppo")
    old = read_rollouts(folder, list({"step", "index", "group", "prompt_id", against}), steps)
    if not pa.types.is_floating(old.schema.field(against).type):
        raise InputError(f"--against: must be a column of rewards, such as total; got {against}; correct it")
    present = pc.unique(old["step"]).to_pylist()
    if not present:
        raise InputError(f"{folder} has none of these steps; leave --steps out for all")
    identity = [ref.digest, [result_settings(source) for source in rewards], _contents(rewards), model, limit]
    parts = run.file.parent / "rescore" / f"{name}-{json_sha256(identity)[:12]}"
    with ExitStack() as opened:
        step_scorer = StepScorer(run, rewards, folder, model, opened)
        for step in track([step for step in present if not _part(parts, step).is_file()]):
            with replacing(_part(parts, step)) as temporary:
                pq.write_table(step_scorer.score(step, limit), temporary, compression="zstd")
        # From `present`, because an earlier call may have had other steps.
        rows = pa.concat_tables([pq.read_table(_part(parts, step)) for step in present])
        address = annotate(artifacts, ref, name, rows.drop_columns(["length"]), WRITER)
        comparison = compare(old, rows, against, step_scorer.prompts, step_scorer.texts)
    shutil.rmtree(parts)
    return Rescored(
        address,
        pc.sum(pc.is_nan(rows["score"])).as_py(),
        tuple(each.used_name for each in rewards if isinstance(each, ExternalReward) and not each.pure),
        comparison,
    )


class StepScorer:
    """Scores the responses of one step after another.

    Args:
        run: The run.
        rewards: The sources.
        folder: Artifact of `ppo`, with the record.
        model: See `rescore`.
        opened: Closes the sources.
    """

    def __init__(
        self,
        run: FinishedRun,
        rewards: tuple[AnyReward, ...],
        folder: Path,
        model: str | None,
        opened: ExitStack,
    ) -> None:
        config = run.config("ppo")
        data = run.data()
        self._folder = folder
        self._decode = load_decoder(data).response
        self.prompts: dict[str, PromptExample] = {
            prompt.prompt_id: prompt for prompt in load_prompts(data, "train")
        }
        self._score_clip = config.ppo.score_clip
        self._model: Scorer | None = None
        self._by_text = False
        if any(isinstance(source, ModelReward) for source in rewards):
            self._load_model(run, config, model, data)
        self._composer = opened.enter_context(
            RewardComposer(rewards, score_clip=self._score_clip, replies=run.home.judge)
        )

    def score(self, step: int, limit: int | None) -> pa.Table:
        """Return the columns of the annotation, and `length`: tokens of the response."""
        columns = ["kind", "step", "index", "group", "prompt_id", "response_ids", "finished"]
        rows = read_rollouts(self._folder, columns, [step])
        if limit is not None:
            rows = rows.filter(pc.less(rows["group"], limit))
        samples = self._samples(rows)
        model_scores = None if self._model is None else self._model_scores(self._model, samples)
        batch = self._composer.score(samples, model_scores)
        return pa.table(
            {
                **{name: rows[name] for name in ("kind", "step", "index")},
                "score": pa.array(batch.total, pa.float64()),
                **{f"{REWARD}{name}": pa.array(values) for name, values in batch.by_source.items()},
                "length": pc.list_value_length(rows["response_ids"]),
            }
        )

    def texts(self, places: Sequence[tuple[int, int]]) -> list[str]:
        """Return the beginning of the responses at these (step, index)."""
        columns = ["step", "index", "prompt_id", "response_ids", "finished"]
        rows = read_rollouts(self._folder, columns, {step for step, _ in places})
        numbers = list(zip(rows["step"].to_pylist(), rows["index"].to_pylist(), strict=True))
        samples = self._samples(rows.take([numbers.index(place) for place in places]))
        return [sample.response[:_SHOWN_CHARACTERS] for sample in samples]

    def _samples(self, rows: pa.Table) -> list[RewardInput]:
        return [
            reward_input(self.prompts[row["prompt_id"]], row["response_ids"], row["finished"], self._decode)
            for row in rows.to_pylist()
        ]

    def _load_model(self, run: FinishedRun, config: PipelineConfig, model: str | None, data: Path) -> None:
        folder, template = locate(model or run.artifact("reward")[1].uri, run.home, run.endpoint)
        self._model = Scorer(
            folder,
            template=template,
            dtype=config.reward.deepspeed.dtype,
            attention="eager" if config.model.attention == "eager" else "sdpa",
            device=resolve_device("auto"),
            micro_batch_tokens=config.ppo.micro_batch_tokens,
        )
        # A model with another tokenizer reads the text.
        own, policy = load_tokenizer(str(folder)), load_tokenizer(str(data / "tokenizer"))
        self._by_text = own.get_vocab() != policy.get_vocab()

    def _model_scores(self, model: Scorer, samples: Sequence[RewardInput]) -> list[float]:
        pairs, rows = [], []
        for row, sample in enumerate(samples):
            item: dict[str, Any] = {
                "prompt_ids": list(sample.prompt_ids),
                "response_ids": list(sample.response_ids),
            }
            if self._by_text:
                item = {"prompt": sample.prompt, "response": sample.response, "finished": sample.finished}
            try:
                pairs.append(model.encode(item))
            except ItemError:  # such as a response that is too long for this model: it has no value
                continue
            rows.append(row)
        scores = np.full(len(samples), np.nan)
        scores[rows] = model.scores(pairs)
        return scores.tolist()


def _part(parts: Path, step: int) -> Path:
    return parts / f"{step:08d}.parquet"


def _contents(rewards: Sequence[AnyReward]) -> list[str]:
    """Return the sha256 of the Python files and rubrics of the sources."""
    files = [function_file(source) for source in rewards if isinstance(source, PythonReward)]
    rubrics = [source.rubric for source in rewards if isinstance(source, LanguageModelReward)]
    return [hash_file(Path(file)) for file in (*files, *rubrics) if file is not None and Path(file).is_file()]
