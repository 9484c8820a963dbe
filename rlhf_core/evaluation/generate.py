"""Sample responses to prompts with vLLM engines: one in this process, several as Ray actors.

An engine that changes classes of transformers is an actor, too (`models.architectures`): this process loads
the same model afterwards to score the responses.

Models that differ in nothing but the values of their weights are sampled by the same engine, one after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.ranks import map_ranks, needs_actors
from rlhf_core.config import PipelineConfig
from rlhf_core.engines.distributed import Rank
from rlhf_core.evaluation.policy_files import PolicyFiles, adapter_rank
from rlhf_core.models.architectures import engine_changes_classes
from rlhf_core.rewards.compose import reward_inputs
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.heartbeat import heartbeat, idle
from rlhf_core.types import PromptExample, RewardInput, Rollout, StageContext

if TYPE_CHECKING:
    from rlhf_core.engines.vllm import Engine

_ADAPTER_ID = 1  # vLLM refuses 0


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled."""

    temperature: float
    answers: int = 1
    """Responses to each prompt."""
    purpose: str = "evaluate"
    """Name from which the seeds are derived, so that different uses have different random numbers."""

    @classmethod
    def of_evaluation(cls, config: PipelineConfig, answers: int = 1) -> SamplingSettings:
        """Return so many responses to each prompt, at the temperature of the evaluation."""
        return cls(config.evaluation_temperature, answers)


def seed_of(config: PipelineConfig, prompt_id: str, purpose: str = SamplingSettings.purpose) -> int:
    """Return the seed of the request for a prompt. vLLM adds the number of the sample."""
    # Without the policy: all models of a comparison answer with the same random numbers.
    return derive_seed(config.run.seed, purpose, prompt_id, 0)


def responses_of(
    config: PipelineConfig,
    models: Mapping[str, PolicyFiles],
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[PromptExample],
    *,
    device: str,
    context: StageContext,
) -> dict[str, list[RewardInput]]:
    """Return the responses (n,) of each model. Only one model is in memory at a time.

    Args:
        config: Configuration of the run.
        models: Files of each model by name.
        decode: Decodes the tokens of a response.
        prompts: (n,) held-out prompts.
        device: Device of the engines.
        context: Context of the stage; its progress is reported after each batch.
    """
    found = responses_to_sets(config, models, decode, {"": prompts}, device=device, context=context)
    return {model: by_set[""] for model, by_set in found.items()}


def responses_to_sets(
    config: PipelineConfig,
    models: Mapping[str, PolicyFiles],
    decode: Callable[[Sequence[int]], str],
    sets: Mapping[str, Sequence[PromptExample]],
    *,
    device: str,
    context: StageContext,
    answers: int = 1,
) -> dict[str, dict[str, list[RewardInput]]]:
    """Return the responses of each model to each set of prompts: the first ones to all prompts, then the
    second ones, and so on. Each model is loaded once, and no batch has prompts of two sets: further sets
    change no response to the first. Nor does an engine that samples several models.

    Args:
        config: Configuration of the run.
        models: Files of each model by name.
        decode: Decodes the tokens of a response.
        sets: Prompts by the name of their set.
        device: Device of the engines.
        context: Context of the stage; its progress is reported after each batch.
        answers: Responses of each model to each prompt.
    """
    count = answers * sum(map(len, sets.values()))
    total = len(models) * count
    responses: dict[str, dict[str, list[RewardInput]]] = {}
    for names in _names_by_engine(models):
        before = len(responses) * count

        def report(done: int, before: int = before) -> None:
            context.progress("evaluate", before + done, total, "responses")

        files = [models[name] for name in names]
        sampling = SamplingSettings.of_evaluation(config, answers)
        request = _Request(config, files, list(sets.values()), sampling, device)
        by_model = _sample(request, report, context)
        for name, found in zip(names, by_model, strict=True):
            responses[name] = {}
            for (each, prompts), rollouts in zip(sets.items(), found, strict=True):
                responses[name][each] = []
                for number in range(answers):
                    responses[name][each] += reward_inputs(decode, prompts, rollouts[number::answers])
        failpoint("evaluate.sampled")
    return responses


def _names_by_engine(models: Mapping[str, PolicyFiles]) -> list[list[str]]:
    """Return the names of the models, in order, in groups that one engine samples."""
    from rlhf_core.engines.sync.wire import are_interchangeable  # imports torch

    groups: list[list[str]] = []
    for name, files in models.items():
        first = models[groups[-1][0]] if groups else None
        if (
            first is not None
            and first.adapter is None
            and files.adapter is None
            and are_interchangeable(first.model, files.model)
        ):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def sample_responses(
    config: PipelineConfig,
    files: PolicyFiles,
    prompts: Sequence[PromptExample],
    *,
    device: str,
    done: Callable[[int], None],
    context: StageContext | None = None,
    sampling: SamplingSettings | None = None,
) -> list[Rollout]:
    """Return the responses to (n,) prompts, in the order of the prompts: (n * answers,).

    A single engine runs in this process or in an actor (see above), several (`evaluate.engines`) or those of
    a cluster in actors.

    Without `sampling`, there is one response per prompt and the temperature is
    `config.evaluation_temperature`, which depends on the sections `evaluate` and `ppo`: a stage that calls
    this function then needs both in its `sections`. The seed of a response depends only on the prompt, so
    that all models use the same random numbers. The engine is shut down at the end, also after an error.

    Args:
        config: Configuration of the run.
        files: Files of the model.
        prompts: (n,) prompts.
        device: Device of the engine.
        done: Is called after each batch with the number of responses so far.
        context: Context of the stage, for actors; None outside a stage.
        sampling: Temperature and number of responses; None: those of the evaluation.
    """
    sampling = sampling or SamplingSettings.of_evaluation(config)
    [[rollouts]] = _sample(_Request(config, [files], [prompts], sampling, device), done, context)
    return rollouts


@dataclass(frozen=True)
class _Request:
    """What is sampled. All models are sampled by the same engines."""

    config: PipelineConfig
    models: Sequence[PolicyFiles]
    sets: Sequence[Sequence[PromptExample]]
    sampling: SamplingSettings
    device: str

    @property
    def count(self) -> int:
        """Number of responses."""
        return len(self.models) * self.sampling.answers * sum(map(len, self.sets))


def _sample(
    request: _Request, done: Callable[[int], None], context: StageContext | None
) -> list[list[list[Rollout]]]:
    """Return the responses of each model to each set."""
    # All models of a request are of one kind (`_names_by_engine`), so the first one decides.
    if needs_engine_actors(request.config, request.models[0].model):
        return _sample_on_actors(request, done, context)
    return _sample_here(request, done)


def needs_engine_actors(config: PipelineConfig, folder: Path) -> bool:
    """Return whether engines with the model in `folder` are actors."""
    return needs_actors(config.evaluate.engines) or engine_changes_classes(folder)


def on_engines(
    target: Callable[..., Any], config: PipelineConfig, device: str, context: StageContext | None, *args: Any
) -> list[Any]:
    """Return what `target(rank, config, *args, context)` returns in the process of each engine of
    `evaluate.engines`.

    Args:
        target: A function of a module.
        config: Configuration of the run.
        device: Device of the engines.
        context: Context of the stage; None outside a stage.
        args: Further arguments of `target`.
    """
    return map_ranks(
        target,
        config.evaluate.engines,
        device,
        config,
        *args,
        context=context,
        label="engine",
        gpus_per_rank=config.ppo.engine.tensor_parallel,
        run=config.run,
    )


@contextmanager
def running_engine(config: PipelineConfig, folder: Path, device: str, **options: Any) -> Iterator[Engine]:
    """Start an engine in this process, and shut it down at the end. `options` are those of `Engine`."""
    from rlhf_core.engines.vllm import Engine

    try:
        heartbeat("start an engine", config.run.timeouts.start)
        engine = Engine(folder, config.ppo.engine, device=device, **options)
        try:
            yield engine
        finally:
            heartbeat("end the engine")
            # Before other models are loaded: vLLM has reserved a share of the device for its cache.
            engine.shutdown()
    finally:
        # Also after an error, which the match survives: the limit of this engine must not end what follows.
        idle()


def _sample_on_actors(
    request: _Request, report: Callable[[int], None], context: StageContext | None
) -> list[list[list[Rollout]]]:
    """Sample with one engine per actor, and return all responses in the order of the prompts."""
    config = request.config

    def progress(task: str, done: int, total: int, unit: str, **metrics: float) -> None:
        # The other engines are about as far as the first.
        report(min(done * config.evaluate.engines, request.count))

    if context is not None:
        context = replace(context, progress=progress)
    # Each node gets the folders in a tuple.
    models = tuple(request.models)
    shares = on_engines(
        _sample_share, config, request.device, context, models, request.sets, request.sampling
    )
    results: list[list[list[Rollout]]] = []
    for model in range(len(request.models)):
        by_set = []
        for index, prompts in enumerate(request.sets):
            parts = [share[model][index] for share in shares]
            by_set.append(_in_order(parts, len(prompts), request.sampling.answers))
        results.append(by_set)
    return results


def _in_order(shares: Sequence[Sequence[Rollout]], prompts: int, answers: int) -> list[Rollout]:
    """Return the responses of all engines in the order of the prompts.

    Prompt i was in share i modulo the number of engines.
    """
    found: list[Rollout] = []
    for i in range(prompts):
        start = i // len(shares) * answers
        found += shares[i % len(shares)][start : start + answers]
    return found


def _sample_share(
    rank: Rank,
    config: PipelineConfig,
    models: Sequence[PolicyFiles],
    sets: Sequence[Sequence[PromptExample]],
    sampling: SamplingSettings,
    context: StageContext | None,
) -> list[list[list[Rollout]]]:
    """Sample the share of one engine in its own process."""
    # `_in_order` undoes this division, so both must agree.
    shares = [prompts[rank.rank :: rank.world_size] for prompts in sets]
    request = _Request(config, models, shares, sampling, rank.device)

    def done(so_far: int) -> None:
        if context is not None:
            context.progress("engine", so_far, request.count, "responses")

    return _sample_here(request, done)


def _sample_here(request: _Request, done: Callable[[int], None]) -> list[list[list[Rollout]]]:
    """Sample with an engine in this process. It loads the weights of one model after the other."""
    from rlhf_core.engines.sync.wire import Acknowledgement, folder_checksums, verify

    config = request.config
    first, *others = request.models
    seed = derive_seed(config.run.seed, request.sampling.purpose)
    options = {
        "max_model_len": config.max_sequence_tokens,
        # vLLM gives it to `numpy.random.seed`, which refuses more than 32 bits.
        "seed": seed % 2**31,
        "weight_transfer": "files" if others else None,
        "adapter_rank": None if first.adapter is None else adapter_rank(first.adapter),
        "head_dtype": config.model.head_dtype,
    }
    before = 0

    def report(sampled: int) -> None:
        done(before + sampled)

    with running_engine(config, first.model, request.device, **options) as engine:
        # The first one only: a model with an adapter is never among `others` (`_names_by_engine`).
        adapter = None
        if first.adapter is not None:
            adapter = _ADAPTER_ID
            engine.load_adapter(adapter, first.adapter)
        found = [_sample_with(engine, adapter, request, report)]
        for number, files in enumerate(others, start=1):
            before += sum(map(len, found[-1]))
            heartbeat("replace the weights", config.run.timeouts.start)
            loaded = Acknowledgement(0, number, engine.load_weights(files.model))
            # Answers of the first model under the name of the second one would look like a tie.
            verify(folder_checksums(files.model), number, [loaded])
            found.append(_sample_with(engine, adapter, request, report))
    return found


def _sample_with(
    engine: Engine, adapter: int | None, request: _Request, done: Callable[[int], None]
) -> list[list[Rollout]]:
    """Return the responses of the present weights to each set."""
    config, sampling = request.config, request.sampling
    # A prompt takes a place in the engine for each of its samples.
    at_once = max(1, config.ppo.engine.max_num_seqs // sampling.answers)
    found: list[list[Rollout]] = []
    for prompts in request.sets:
        found.append([])
        for start in range(0, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            seeds = [seed_of(config, prompt.prompt_id, sampling.purpose) for prompt in batch]
            found[-1] += engine.generate(
                batch,
                n=sampling.answers,
                max_new_tokens=config.limits.new,
                temperature=sampling.temperature,
                seeds=seeds,
                policy_version=0,
                adapter=adapter,
            )
            done(sum(map(len, found)))
    return found
