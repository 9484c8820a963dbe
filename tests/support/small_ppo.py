"""PPO on a rule reward with models of a few thousand parameters.

It uses the real Ray, vLLM and DeepSpeed, without stages, data, checkpoints or tracking.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PPOSettings, Role
from rlhf_core.ppo.controller import PPOController
from rlhf_core.ppo.fleet.fleet import Fleet
from rlhf_core.ppo.sampling.reward_actor import RewardSettings, open_rewards
from rlhf_core.ppo.training.batch import RolloutBatch
from rlhf_core.rewards.compose import RewardComposer
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.system.heartbeat import Monitor
from rlhf_core.types import PromptExample, Rollout, StageContext
from tests.support.checkpoints import keep
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.tiny_llama import save_tiny_llama

C = TypeVar("C", bound=PPOController)

VOCABULARY = 101
TENSORS = 2 * 9 + 2
"""Tensors of `save_small_model`: two decoder layers of nine each, the tied embedding and the last norm."""
ADAPTER_TENSORS = 2 * 7 * 2
"""Tensors of its adapter: two for each of the seven linear layers of a decoder layer."""
ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward")


class Nowhere:
    """Checkpoints, metrics and progress: none."""

    def latest(self) -> None:
        return None

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def local_context(folder: Path) -> StageContext:
    """Return the context of a stage that reads nothing and reports to nobody."""
    nowhere: Any = Nowhere()
    return StageContext({}, folder, folder, nowhere, nowhere, nowhere.progress)


def save_small_model(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    return save_tiny_llama(
        folder,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )


def small_config(model: Path, ppo: dict[str, Any], **run: Any) -> PipelineConfig:
    """Return a configuration of three steps that rewards the share of tokens below 50.

    `ppo` and `run` replace settings of these sections.
    """
    defaults = {
        "steps": 3,
        "micro_batch_tokens": 128,
        "policy": {"learning_rate": 5e-3, "schedule": "constant"},
        "rewards": [{"type": "token_share", "below": 50}],
    }
    tree = {
        "run": {"device": "cpu", "threads": 2, **run},
        "model": {"path": str(model)},
        "data": {"max_prompt_tokens": 16},
        "ppo": {**defaults, **ppo},
    }
    return config_from_tree(tree, "test")


def small_prompts() -> list[PromptExample]:
    """Return 20 prompts of 5 to 11 tokens."""
    rng = random.Random(0)
    lengths = [4 + i % 7 for i in range(20)]
    return [
        PromptExample(f"p{i}", "", (1, *(rng.randrange(3, VOCABULARY) for _ in range(length))))
        for i, length in enumerate(lengths)
    ]


@contextmanager
def small_ppo(
    config: PipelineConfig,
    model: Path,
    work: Path,
    prompts: Sequence[PromptExample],
    monitor: Monitor | None = None,
    roles: Mapping[Role, Path] | None = None,
    decode: Callable[[Sequence[int]], str] = str,
) -> Iterator[PPOController]:
    """Yield a controller with a started fleet, after the first weight sync.

    Args:
        config: Configuration, usually from `small_config`.
        model: Model folder of every role that is not in `roles`.
        work: Scratch folder.
        prompts: Training prompts.
        monitor: Process monitor, if the test needs one.
        roles: Model folders of single roles.
        decode: Text of a response, for rewards that read it.
    """
    folders = {**dict.fromkeys(ROLES, model), **(roles or {})}
    rewards = RewardSettings(config.ppo.rewards, decode, score_clip=config.ppo.score_clip)
    with (
        open_rewards(rewards) as composer_of,
        Fleet(PPOSettings.of(config), config.run.device, folders, 0, monitor) as fleet,
    ):
        controller = PPOController(fleet, prompts, decode, composer_of(fleet), local_context(work))
        controller.sync()
        yield controller


@contextmanager
def finished_ppo(
    config: PipelineConfig, model: Path, store: Path, work: Path, kind: type[C]
) -> Iterator[tuple[C, list[dict[str, Any]]]]:
    """Run the steps that no checkpoint has. Yield the controller and the metrics of all steps.

    Args:
        config: Configuration, usually from `small_config`.
        model: Model folder of every role.
        store: Folder of the store with the checkpoints.
        work: Scratch folder of this attempt; it must not exist.
        kind: Class of the controller.
    """
    work.mkdir()
    nowhere: Any = Nowhere()
    checkpoints = CheckpointStore(Store(store), "key", work / "checkpoints", keep(2))
    context = StageContext({}, work, work, checkpoints, nowhere, nowhere.progress)
    with (
        RewardComposer(config.ppo.rewards) as composer,
        Fleet(PPOSettings.of(config), "cpu", dict.fromkeys(ROLES, model), 0) as fleet,
    ):
        controller = kind(fleet, small_prompts(), str, composer, context)
        controller.run()
        rows = (work / "metrics.jsonl").read_text().splitlines()
        yield controller, [json.loads(row) for row in rows]


def sampled_rollouts(controller: PPOController, batch: RolloutBatch) -> list[Rollout]:
    """Return the responses of a batch with their log-probabilities by the engine."""
    chunks = controller._fleet.wait(batch.chunks, "rollouts")
    rollouts = []
    for index, ((number, row), prompt) in enumerate(zip(batch.places, batch.prompts, strict=True)):
        chunk = chunks[number]
        rollouts.append(
            Rollout(
                prompt.prompt_id,
                row % chunk.samples,
                tuple(chunk.prompt(row).tolist()),
                tuple(chunk.response(row).tolist()),
                tuple(chunk.rollout_logprobs(row).tolist()),
                bool(batch.finished_B[index]),
                controller.completed_steps,
            )
        )
    return rollouts


def token_columns(controller: PPOController, shift_old: float = 0.0) -> dict[str, torch.Tensor]:
    """Return the columns of the experience of a single policy rank, (N,) each, as they were made.

    Its policy is then trained as if the old log-probabilities were larger by `shift_old`.
    """
    import ray

    def read(rank: Any) -> dict[str, np.ndarray[Any, Any]]:
        values = rank._experience.columns.values
        found = {name: column.copy() for name, column in values.items()}
        values["old_logprobs"] += np.float32(shift_old)
        return found

    (worker,) = controller._fleet.groups["policy"].workers
    found = ray.get(worker.handle.__ray_call__.remote(read), timeout=60)
    return {name: torch.from_numpy(column.copy()) for name, column in found.items()}
