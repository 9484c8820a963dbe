"""Train a model on ranks whose memory is limited. Run by torchrun:

    limited_memory.py FOLDER sft|reward|ppo sharded|whole MIB     limit the address space of a rank to what it
                                                                  has before loading, and MIB more
    limited_memory.py FOLDER load sharded|whole                   write the peak memory of loading, and what a
                                                                  rank has read from the disk

FOLDER has a model in `base` (`make_model`), and gets the results. `whole` loads models as with ZeRO-2.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlhf_core.config import PipelineConfig
from rlhf_core.config.placement import PPOSettings
from rlhf_core.engines import sharding
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.models import policy, saving, score
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.policy import load_policy
from rlhf_core.models.scoring import Batches, sequence_logprobs, sequence_scores, sequence_values
from rlhf_core.ppo.fleet import worker
from rlhf_core.ppo.training.loss_step import (
    OptimizerStep,
    TrainSample,
    UpdateSettings,
    update_critic,
    update_policy,
)
from rlhf_core.stages import reward, sft
from rlhf_core.stages.training import Folders
from rlhf_core.types import PairExample
from tests.integration.deepspeed_step import leave_for_good, limit_gathered_parameters, torchrun_rank
from tests.support.demo_data import with_demo_data

FILE_SIZE = "50MB"
LIVE_SHARE = 0.03
"""Share of the parameters that ZeRO-3 holds gathered at a time, at most. DeepSpeed's limit of 1e9 is more
than this model has, so that every rank would gather all of it. 1e9 is that share of a model with 1e10.
"""
SEQUENCES = [((3 + i, 4, 5, 6), (7, 8, 9 + i, 10, 2)) for i in range(8)]


def make_model(folder: Path, *, layers: int, hidden: int, file_size: str = FILE_SIZE) -> int:
    """Save a model with random weights in float32, and return their bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=512,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    # safetensors maps each file while it is read, which counts as address space and as resident memory.
    model.save_pretrained(folder / "base", max_shard_size=file_size)
    parameters: int = sum(p.numel() for p in model.parameters())
    return 4 * parameters


def configuration(folder: Path, ranks: int) -> PipelineConfig:
    deepspeed = {"zero_stage": 3, "ranks": ranks, "gradient_checkpointing": True, "dtype": "float32"}
    training = {
        "deepspeed": deepspeed,
        "lora": {"r": 4, "alpha": 8},
        "batch_size": ranks,
        "micro_batch_tokens": 64,
        "checkpoint_every": 1,
    }
    ppo = {
        "policy_deepspeed": deepspeed,
        "critic_deepspeed": deepspeed,
        "lora": {"r": 4, "alpha": 8},
        "prompts_per_step": 4 * ranks,
    }
    return PipelineConfig.model_validate_json(
        json.dumps(
            with_demo_data(
                {
                    "model": {"path": str(folder / "base")},
                    "run": {"device": "cpu"},
                    "sft": training,
                    "reward": training,
                    "ppo": ppo,
                }
            )
        )
    )


def status(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run_sft(rank: Rank, config: PipelineConfig, folder: Path) -> None:
    examples = [
        SimpleNamespace(input_ids=(*prompt, *response), loss_mask=(0,) * len(prompt) + (1,) * len(response))
        for prompt, response in SEQUENCES
    ]
    vars(sft).update(load_sft=lambda *_: examples, open_sft=lambda *_: examples)
    folders = Folders({"data": folder}, folder / "work", folder / "sft")
    sft._train(rank, config, folders, None)


def run_reward(rank: Rank, config: PipelineConfig, folder: Path) -> None:
    pairs = [PairExample("", "", prompt, response, response[::-1]) for prompt, response in SEQUENCES]
    vars(reward).update(training_pairs=lambda *_: pairs, load_pairs=lambda *_: pairs)
    inputs = {"data": folder, "sft": folder / "sft"}
    reward._train(rank, config, Folders(inputs, folder / "work", folder / "reward"), "reward", None)


def run_ppo(rank: Rank, config: PipelineConfig, folder: Path) -> None:
    """What the ranks of policy, reference, critic and reward model compute in a step of PPO."""
    ranks: Any = worker.ModelWorker.__new__(worker.ModelWorker)
    ranks._settings, ranks._rank = PPOSettings.of(config), rank
    ranks._roles = ("policy", "reference", "critic", "reward")
    scorer, base = str(folder / "reward" / "model"), str(folder / "sft" / "model")
    ranks._folders = {"policy": base, "reference": base, "critic": scorer, "reward": scorer}
    ranks._models = {}
    for role in ranks._roles:
        torch.manual_seed(0)
        ranks._models[role] = ranks._load(role)
    own = SEQUENCES[rank.rank :: rank.world_size]
    rows = list(range(len(own)))
    batches = Batches(own, [rows], pad_id=0, device="cpu", pack=True)
    old = sequence_logprobs(ranks._models["policy"], batches, 1.0)[0]
    ref = sequence_logprobs(ranks._models["reference"], batches, 1.0)[0]
    values = sequence_values(ranks._models["critic"], batches)
    statistics = ranks._models["reward"].module.statistics
    scores = sequence_scores(ranks._models["reward"], statistics, batches)
    samples = [
        TrainSample(
            *own[i],
            old_logprobs=old[i].numpy(),
            advantages=np.full(len(old[i]), scores[i], np.float32) - values[i].numpy(),
            ref_logprobs=ref[i].numpy(),
            returns=np.full(len(old[i]), scores[i], np.float32),
            old_values=values[i].numpy(),
            weights=np.ones(len(old[i]), np.float32),
        )
        for i in rows
    ]
    tokens = sum(len(response) for _, response in SEQUENCES)
    step = OptimizerStep([rows], len(SEQUENCES), [], tokens)
    settings = UpdateSettings.of(config.ppo)
    update_policy(ranks._models["policy"], samples, [step], settings, 0, kl_coef=0.1, demonstrations=[])
    update_critic(ranks._models["critic"], samples, [step], settings, 0, clip_values=False)
    for role in ("policy", "critic"):
        ranks._models[role].save_checkpoint(folder / "work" / role)
    trained = ranks._models["policy"]
    trained.save_model(folder / "ppo" / "policy", trained.module.save, dtype=torch.float32)


def bytes_from_disk() -> int:
    """Return how many bytes this process has read that the page cache did not have."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def empty_page_cache(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_load(rank: Rank, config: PipelineConfig) -> dict[str, int]:
    """Return the memory of this process before loading, its peak and its end, and what it read from disk."""
    assert config.model.path is not None
    if rank.rank == 0:
        empty_page_cache(Path(config.model.path))
    torch.distributed.barrier()
    before, read = status("VmRSS"), bytes_from_disk()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    model = load_policy(
        str(config.model.path),
        dtype="float32",
        attention="sdpa",
        device="cpu",
        shards=sharding.shards_of(config.sft.deepspeed),
    )
    found = {"before": before, "peak": status("VmHWM"), "after": status("VmRSS")}
    found["read"] = bytes_from_disk() - read
    assert model.packs
    return found


def main() -> None:
    folder, what, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank = torchrun_rank()
    join(rank)
    config = configuration(folder, rank.world_size)
    decoder = SimpleNamespace(pad=0, eos=2, bos=1)
    vars(sft).update(load_decoder=lambda _: decoder)
    vars(reward).update(load_decoder=lambda _: decoder)
    import peft  # noqa: F401  # part of what a rank has before it loads a model
    import transformers.models.llama.modeling_llama  # noqa: F401

    for module in (policy, score):
        vars(module).update(save_model=partial(saving.save_model, file_size=FILE_SIZE))
    if how == "whole":
        for module in (sft, reward, sharding):
            vars(module).update(shards_of=lambda _: None)
    live = int(LIVE_SHARE * ModelFolder(folder / "base").parameters)
    limit_gathered_parameters(live, prefetched=live // 10)
    baseline = status("VmSize")
    if what == "load":
        found = run_load(rank, config)
    else:
        limit = baseline + (int(sys.argv[4]) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        {"sft": run_sft, "reward": run_reward, "ppo": run_ppo}[what](rank, config, folder)
        found = {"baseline": baseline, "limit": limit, "peak": status("VmPeak")}
    (folder / f"{what}-{how}-{rank.rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    leave_for_good()


if __name__ == "__main__":
    main()
