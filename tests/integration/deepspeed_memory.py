"""Measures what training on the CPU allocates, for `test_planned_memory`.

State, by ranks: for every precision and ZeRO stage, the bytes of "weights", "gradients" and "optimizer" of a
tiny policy. Peaks, by the script `python deepspeed_memory.py FILE`: the most bytes of tensors at a time over
two whole SFT steps of a small policy, the least of three runs, because garbage in circles is freed a little
earlier or later.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_core.algo.losses import sft_loss
from rlhf_core.config.training import DeepSpeedConfig, LoraConfig, OptimizerConfig
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, join
from rlhf_core.models.adapters import add_adapter
from rlhf_core.models.attention import implementation
from rlhf_core.models.batching import TokenSequence, collate
from rlhf_core.models.linear import use_onednn
from rlhf_core.models.policy import DTYPES, Policy
from rlhf_core.models.score import ScoreModel
from tests.integration.deepspeed_step import leave_for_good, model

# The same attention on all CPUs. With AMX it needs less than the plan says.
torch.cpu._is_amx_tile_supported = lambda: False

PEAKS: dict[str, dict[str, Any]] = {
    "float32": {},
    "checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "adapters": {"dtype": "bfloat16", "gradient_checkpointing": True, "lora": {"r": 8}},
    "zero-2": {"dtype": "bfloat16", "zero_stage": 2},
    "zero-3": {"dtype": "bfloat16", "zero_stage": 3},
    "scores": {"dtype": "bfloat16", "scores": True},
    "scores, checkpointing": {"dtype": "bfloat16", "gradient_checkpointing": True, "scores": True},
    "scores, adapters": {"gradient_checkpointing": True, "lora": {"r": 8}, "scores": True},
}
"""Name -> DeepSpeed's settings, `lora`, and `scores` for a score head."""
SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048,
}  # fmt: skip
_TRAINING = "planned training"
LENGTHS = (384, 256, 200, 184)


# -- state --


def measure_state(rank: Rank, dtype: str, stage: int) -> dict[str, int]:
    deepspeed = DeepSpeedConfig.model_validate(
        {"ranks": rank.world_size, "zero_stage": stage, "dtype": dtype}
    )
    engine = TrainingEngine(model("policy").to(DTYPES[dtype]), deepspeed, OptimizerConfig(), rank)
    batch = collate([TokenSequence.of((1, 2, 3), (4, 5, 6))], pad_id=0)
    seen: dict[str, int] = {}

    def losses() -> Iterator[torch.Tensor]:
        yield engine(batch).logprobs_N.sum()
        # Backward has run: the gradients lie where the optimizer will find them.
        seen["gradients"] = _bytes(_gradients(engine, stage))

    engine.train_step(losses(), 1)
    seen["weights"] = _bytes([getattr(p, "ds_tensor", p) for p in engine.module.parameters()])
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = [x for s in inner.state.values() for x in s.values() if torch.is_tensor(x) and x.numel() > 1]
    masters = [p for group in inner.param_groups for p in group["params"]]
    if stage == 3:
        masters = list(engine.optimizer.fp32_partitioned_groups_flat)
    if stage == 0 and dtype == "float32":
        masters = []  # they are the weights
    seen["optimizer"] = _bytes(state) + _bytes(masters)
    return seen


def _gradients(engine: TrainingEngine, stage: int) -> list[Any]:
    if stage <= 1:
        return [p.grad for p in engine.module.parameters()]
    if stage == 2:
        return [g for group in engine.optimizer.all_grad_tensors.values() for g in group]
    return list(engine.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values())


def _bytes(tensors: Iterable[Any]) -> int:
    distinct = {t.data_ptr(): t for t in tensors if t is not None and t.numel()}
    return sum(t.numel() * t.element_size() for t in distinct.values())


# -- peaks --


def small_model(dtype: str, device: str, *, scores: bool = False, **shape: Any) -> Any:
    """Random weights; `SHAPE` but for `shape`."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SHAPE, **shape}, max_position_embeddings=16384, attn_implementation=implementation("sdpa")
    )
    config.num_labels = 1
    with torch.device(device):
        lm = (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config).to(DTYPES[dtype])
    lm = use_onednn(lm) if device == "cpu" else lm
    return ScoreModel(lm) if scores else Policy(lm)


def train(engine: TrainingEngine, lengths: Iterable[int], steps: int, *, scores: bool = False) -> None:
    """Steps of two equal micro-batches, packed, every token a target (or a value)."""
    vocabulary = engine.module.lm.config.vocab_size
    rows = [TokenSequence.of([1], [t % vocabulary for t in range(1, length)]) for length in lengths]
    batch = collate(rows, pad_id=0, pack=True).to(engine.rank.torch_device)

    def losses() -> Iterator[torch.Tensor]:
        for _ in range(2):
            if scores:
                yield engine(batch, "tokens").pow(2).mean()
                continue
            logprobs_N = engine(batch).logprobs_N
            yield sft_loss(logprobs_N, torch.ones_like(logprobs_N), denominator=2 * len(logprobs_N))

    for _ in range(steps):
        engine.train_step(losses(), steps)


def measure_peak(settings: dict[str, Any]) -> int:
    from torch.profiler import ProfilerActivity, profile, record_function

    settings = dict(settings)
    lora, scores = settings.pop("lora", None), settings.pop("scores", False)
    deepspeed = DeepSpeedConfig.model_validate(settings)
    # The engine before is full of circles; its memory must not be given back in the middle of this one
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = small_model(deepspeed.dtype, "cpu", scores=scores)
        add_adapter(made, None if lora is None else LoraConfig.model_validate(lora))
        engine = TrainingEngine(made, deepspeed, OptimizerConfig(), Rank())
        with record_function(_TRAINING):
            train(engine, LENGTHS, 2, scores=scores)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    begin = next(event["ts"] for event in events if event.get("name") == _TRAINING)
    changes = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"])
    now = peak = 0
    for change in changes:
        now += change["args"]["Bytes"]
        peak = max(peak, now) if change["ts"] >= begin else peak
    return int(peak)


def measure_states(number: int, ranks: int, port: int, file: Path) -> None:
    """One rank, which measures under every precision and ZeRO stage."""
    rank = Rank(number, ranks, number, "127.0.0.1", port)
    join(rank)
    found = [
        [dtype, stage, measure_state(rank, dtype, stage)]
        for dtype in ("float32", "bfloat16")
        for stage in (0, 1, 2, 3)
    ]
    if number == 0:
        file.write_text(json.dumps(found))
    torch.distributed.barrier()
    leave_for_good()


def main() -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # before the test's own limit, which says nothing
    join(Rank())
    found = {name: min(measure_peak(settings) for _ in range(3)) for name, settings in PEAKS.items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
    leave_for_good()


if __name__ == "__main__":
    main()
