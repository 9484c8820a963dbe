"""Train models that were loaded whole and models that were sharded while they were loaded, and write what
came out: the ranks of `test_sharded_loading.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import torch

from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig, SFTConfig
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.engines.sharding import shards_of
from rlhf_core.errors import ModelError
from rlhf_core.models import policy
from rlhf_core.models.adapters import add_adapter
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.policy import load_policy
from rlhf_core.models.score import load_score_model
from rlhf_core.stages.sft import train_step as sft_step
from tests.integration.deepspeed_step import leave_for_good, shard_small_parameters

LORA = LoraConfig(r=4, alpha=8)
CASES: dict[str, tuple[str, str, LoraConfig | None, bool]] = {
    # folder, precision, adapter, trained
    "tied": ("tied", "float32", None, True),
    "adapter": ("untied", "bfloat16", LORA, True),
    "experts": ("experts", "float32", None, True),
    "reference": ("tied", "float32", None, False),
    "critic": ("score", "float32", None, True),
    "critic of a policy": ("untied", "bfloat16", None, True),
}


def load(name: str, rank: Rank, config: DeepSpeedConfig, folder: Path, *, sharded: bool) -> TrainingEngine:
    model_folder, dtype, lora, trained = CASES[name]
    torch.manual_seed(5)
    model: Any = (load_score_model if "critic" in name else load_policy)(
        folder / model_folder,
        dtype=dtype,
        attention="sdpa",
        device="cpu",
        shards=shards_of(config) if sharded else None,
    )
    assert sharded == any(hasattr(p, "ds_id") for p in model.parameters())
    if "critic" in name:
        model.become_critic(1.0)
    add_adapter(model, lora)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant")
    return TrainingEngine(model, config, optimizer if trained else None, rank)


def outcome(name: str, rank: Rank, folder: Path, *, sharded: bool) -> dict[str, torch.Tensor]:
    """Everything that loading and one optimizer step give."""
    dtype, trained = CASES[name][1], CASES[name][3]
    config = DeepSpeedConfig.model_validate(
        {
            "zero_stage": 3,
            "ranks": rank.world_size,
            "dtype": dtype,
            "gradient_checkpointing": True,
            "hpz": 2 if name == "tied" else 1,
        }
    )
    engine = load(name, rank, config, folder, sharded=sharded)
    found = {f"loaded.{key}": value.clone() for key, value in engine.weights()}
    found |= {f"buffer.{key}": value.clone() for key, value in engine.module.lm.named_buffers()}
    found["packs"] = torch.tensor(engine.module.packs)
    sequences = [TokenSequence.of((3 + i, 4, 5), tuple(range(6, 9 + i))) for i in range(5)]
    batch = collate(sequences, pad_id=0, pack=True)
    with torch.no_grad():
        if "critic" in name:
            found["values"] = engine(batch, "tokens").clone()
        else:
            found["logprobs"] = engine(batch).logprobs_N.clone()
    found["random"] = torch.rand(4)
    if trained and "critic" not in name:
        sft_step(engine, sequences, SFTConfig(batch_size=5, micro_batch_tokens=20), 2, 0)
    elif trained:
        part = sequences[rank.rank :: rank.world_size]
        engine.train_step(iter([engine(collate(part, pad_id=0), "last").sub(1.0).square().mean()]), 2)
    found |= {f"trained.{key}": value.clone() for key, value in engine.weights()}
    save = folder / f"saved-{name}-{'sharded' if sharded else 'whole'}"
    engine.save_model(save, engine.module.save)
    if trained:
        engine.close()
    return found


def refusals(rank: Rank, folder: Path) -> dict[str, list[str]]:
    """Messages of the models in `folder`, loaded whole and sharded."""
    config = DeepSpeedConfig.model_validate({"zero_stage": 3, "ranks": rank.world_size})
    messages: dict[str, list[str]] = {}
    for path in sorted(folder.glob("bad-*")):
        for shards in (None, shards_of(config)):
            with contextlib.suppress(ModelError):
                load_policy(path, dtype="float16", attention="sdpa", device="cpu", shards=shards)
                raise AssertionError(f"{path} was loaded")
            try:
                load_policy(path, dtype="float16", attention="sdpa", device="cpu", shards=shards)
            except ModelError as error:
                messages.setdefault(path.name, []).append(error.message)
    return messages


def loading_peak(rank: Rank, folder: Path) -> int:
    """Return the largest number of bytes that are allocated while a sharded model is loaded.

    Without the self-test, which gathers single layers: they are a large part of a model as small as this.
    """
    vars(policy)["tested"] = lambda lm, pack: False
    shards = shards_of(DeepSpeedConfig.model_validate({"zero_stage": 3, "ranks": rank.world_size}))
    gc.collect()
    before, sizes, loaded = allocated(), [0], threading.Event()

    def sample() -> None:
        while not loaded.wait(0.001):
            sizes.append(allocated())

    sampling = threading.Thread(target=sample)
    sampling.start()
    model = load_policy(folder, dtype="float32", attention="sdpa", device="cpu", shards=shards)
    loaded.set()
    sampling.join()
    assert not model.packs
    return max(*sizes, allocated()) - before


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated() -> int:
    """Return the bytes that this process has allocated. Its resident memory has freed memory as well."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def work(number: int, ranks: int, port: int, folder: Path) -> None:
    """One rank."""
    rank = Rank(number, ranks, number, "127.0.0.1", port)
    join(rank)
    shard_small_parameters()
    for name in CASES:
        for sharded in (False, True):
            found = outcome(name, rank, folder, sharded=sharded)
            torch.save(found, folder / f"{name}-{'sharded' if sharded else 'whole'}-{rank.rank}.pt")
    (folder / f"refusals-{rank.rank}.json").write_text(json.dumps(refusals(rank, folder)))
    if sys.platform == "linux":
        (folder / f"peak-{rank.rank}").write_text(str(loading_peak(rank, folder / "larger" / "base")))
    torch.distributed.barrier()
    leave_for_good()
