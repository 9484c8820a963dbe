"""Responses of one model to held-out prompts, by a vLLM engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlhf_core.config import PipelineConfig
from rlhf_core.evaluation.policy_files import PolicyFiles, adapter_rank
from rlhf_core.rewards.compose import reward_inputs
from rlhf_core.seeds import derive_seed
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.heartbeat import heartbeat, idle
from rlhf_core.types import Progress, PromptExample, RewardInput, Rollout

_ADAPTER = 1
"""Number of the adapter in the engine."""


def responses_of(
    config: PipelineConfig,
    models: Mapping[str, PolicyFiles],
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[PromptExample],
    *,
    device: str,
    progress: Progress,
) -> dict[str, list[RewardInput]]:
    """Responses (n,) of each of `models`, one engine after the other: only one is in memory."""
    total = len(models) * len(prompts)
    responses: dict[str, list[RewardInput]] = {}
    for name, files in models.items():
        before = sum(map(len, responses.values()))

        def report(done: int, before: int = before) -> None:
            progress("evaluate", before + done, total, "responses")

        rollouts = sample_responses(config, files, prompts, device=device, done=report)
        responses[name] = reward_inputs(decode, prompts, rollouts)
        failpoint("evaluate.sampled")
    return responses


def sample_responses(
    config: PipelineConfig,
    files: PolicyFiles,
    prompts: Sequence[PromptExample],
    *,
    device: str,
    done: Callable[[int], None],
) -> list[Rollout]:
    """One response per prompt (n,), in order; `done(k)` is called after each batch with the responses so far.

    Seeds depend on the prompt alone, so two models answer with the same random numbers. The engine is gone
    afterwards.
    """
    from rlhf_core.engines.vllm import Engine

    seed = derive_seed(config.run.seed, "evaluate")
    heartbeat("start an engine", config.run.timeouts.start)
    try:
        engine = Engine(
            files.model,
            config.ppo.engine,
            device=device,
            max_model_len=config.max_sequence_tokens,
            seed=seed % 2**31,
            adapter_rank=None if files.adapter is None else adapter_rank(files.adapter),
            head_dtype=config.model.head_dtype,
        )
        if files.adapter is not None:
            engine.load_adapter(_ADAPTER, files.adapter)
    except BaseException:
        idle()
        raise
    rollouts: list[Rollout] = []
    try:
        for start in range(0, len(prompts), config.ppo.engine.max_num_seqs):
            batch = prompts[start : start + config.ppo.engine.max_num_seqs]
            rollouts += engine.generate(
                batch,
                n=1,
                max_new_tokens=config.ppo.max_new_tokens,
                temperature=config.evaluation_temperature,
                seeds=[derive_seed(config.run.seed, "evaluate", prompt.prompt_id, 0) for prompt in batch],
                policy_version=0,
                adapter=None if files.adapter is None else _ADAPTER,
            )
            done(len(rollouts))
    finally:
        heartbeat("end the engine")
        engine.shutdown()
        idle()
    return rollouts
