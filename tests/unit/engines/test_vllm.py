"""What vLLM is asked for; vLLM is scripted here.

- an engine starts its own processes, also under Ray: none where it has one device, one each where it has more
- log-probabilities are taken from an engine in this process (`take_logprobs`)
- on the CPU no sequence is computed in parts, whatever its length: vLLM cannot take back what a seeded
  request drew there
- on a GPU, vLLM does not look for a sampler that our requests cannot use, and float32 is not rounded to TF32;
  what the user has set stays
- a small model on the CPU starts without torch's compiler
- prompts are taken while others are sampled, as many as there is room for, and one if there is room for none;
  the samples are in the order in which the prompts were taken
- with prefix caching, a cache that vLLM does not reset is an error; without it, nothing is reset
- a lack of memory has an error that names the cause, other processes on the device or a share that is too
  small; any other error is raised unchanged
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from rlhf_core.config.ppo_sections import EngineConfig
from rlhf_core.engines.vllm import Engine
from rlhf_core.errors import InfrastructureError, OutOfMemory, WeightSyncError


def _update(*_: Any) -> dict[int, Any]:
    """The scheduler's method."""
    return {}


class ScriptedVllm:
    """Stands for the package vllm."""

    SamplingParams = TokensPrompt = SimpleNamespace

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        """Arguments of the last engine."""
        self.engine = SimpleNamespace()
        """vLLM's part of the last engine."""
        self.error: Exception | None = None
        """Is raised by an engine that starts."""

    def LLM(self, **options: Any) -> Any:  # vLLM's name
        if self.error is not None:
            raise self.error
        self.options.update(options)
        core = SimpleNamespace(scheduler=SimpleNamespace(update_from_output=_update))
        # With several devices vLLM's core is in another process.
        client = SimpleNamespace(engine_core=core) if options["tensor_parallel_size"] == 1 else None
        processor = SimpleNamespace(request_states={})
        self.engine = SimpleNamespace(step=lambda: None, engine_core=client, output_processor=processor)
        return SimpleNamespace(llm_engine=self.engine)

    def modules(self) -> dict[str, Any]:
        return {
            "vllm": self,
            "vllm.config.weight_transfer": SimpleNamespace(WeightTransferConfig=dict),
            "vllm.lora.request": SimpleNamespace(LoRARequest=None),
        }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedVllm]:
    for name in (
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "TRITON_F32_DEFAULT",
        "TORCHDYNAMO_DISABLE",
    ):
        monkeypatch.setenv(name, "1")
    scripted = ScriptedVllm()
    with mock.patch.dict(sys.modules, scripted.modules()):
        yield scripted


@pytest.fixture
def asked(vllm: ScriptedVllm) -> dict[str, Any]:
    """The options of the last engine."""
    return vllm.options


@pytest.mark.parametrize(("devices", "backend"), [(1, "uni"), (2, "mp"), (8, "mp")])
def test_an_engine_starts_its_own_processes(
    asked: dict[str, Any], tmp_path: Path, devices: int, backend: str
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    config = EngineConfig(tensor_parallel=devices)
    Engine(tmp_path, config, device="cuda", max_model_len=64, seed=0, weight_transfer="nccl")
    assert asked["tensor_parallel_size"] == devices
    assert asked["distributed_executor_backend"] == backend


def test_log_probabilities_are_taken_from_an_engine_in_this_process(
    vllm: ScriptedVllm, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    Engine(tmp_path, EngineConfig(), device="cpu", max_model_len=64, seed=0)
    assert vllm.engine.engine_core.engine_core.scheduler.update_from_output is not _update


@pytest.mark.parametrize(
    ("longest", "sequences", "budget"), [(64, 256, 4096), (5000, 256, 5000), (64, 6000, 6000)]
)
def test_on_the_cpu_no_sequence_is_computed_in_parts(
    asked: dict[str, Any], tmp_path: Path, longest: int, sequences: int, budget: int
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    Engine(tmp_path, EngineConfig(max_num_seqs=sequences), device="cpu", max_model_len=longest, seed=0)
    assert asked["enable_chunked_prefill"] is False
    assert asked["max_num_batched_tokens"] == budget


@pytest.mark.parametrize(
    ("device", "eager", "vocabulary", "compiles"),
    [
        ("cpu", True, 384, False),
        ("cpu", True, 32000, True),  # compiled code counts the ranks of tokens 18 times as fast
        ("cpu", False, 384, True),
        ("cuda", True, 384, True),
    ],
)
def test_a_small_model_on_the_cpu_starts_without_the_compiler(
    asked: dict[str, Any], tmp_path: Path, device: str, eager: bool, vocabulary: int, compiles: bool
) -> None:
    del os.environ["TORCHDYNAMO_DISABLE"]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": vocabulary}))
    Engine(tmp_path, EngineConfig(enforce_eager=eager), device=device, max_model_len=64, seed=0)
    assert ("TORCHDYNAMO_DISABLE" not in os.environ) == compiles


@pytest.mark.parametrize(("head", "given"), [("model", None), ("float32", {"head_dtype": "float32"})])
def test_a_head_in_float32_is_asked_for_by_name(
    asked: dict[str, Any], tmp_path: Path, head: str, given: dict[str, str] | None
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    Engine(tmp_path, EngineConfig(), device="cpu", max_model_len=64, seed=0, head_dtype=head)
    assert asked.get("hf_overrides") == given


def test_on_a_gpu_vllm_schedules_as_it_likes(asked: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    Engine(tmp_path, EngineConfig(), device="cuda", max_model_len=64, seed=0)
    assert not {"enable_chunked_prefill", "max_num_batched_tokens"} & asked.keys()


@pytest.mark.parametrize(
    ("device", "dtype", "given", "expected"),
    [
        ("cuda", "float32", {}, ("0", "ieee")),
        ("cuda", "bfloat16", {}, ("0", None)),
        (
            "cuda",
            "float32",
            {"VLLM_USE_FLASHINFER_SAMPLER": "1", "TRITON_F32_DEFAULT": "tf32"},
            ("1", "tf32"),
        ),
        ("cpu", "float32", {}, (None, None)),
    ],
)
def test_vllm_gets_its_settings_of_sampling_and_matrix_products_on_a_gpu(
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: Any,
    given: dict[str, str],
    expected: tuple[str | None, str | None],
) -> None:
    names = ("VLLM_USE_FLASHINFER_SAMPLER", "TRITON_F32_DEFAULT")
    for name in names:
        if name in given:
            monkeypatch.setenv(name, given[name])
        else:
            monkeypatch.delenv(name)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    Engine(tmp_path, EngineConfig(dtype=dtype), device=device, max_model_len=64, seed=0)
    assert tuple(map(os.environ.get, names)) == expected


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("Free memory on device is less than desired GPU memory utilization", OutOfMemory),
        ("No available memory for the cache blocks", InfrastructureError),
        ("unknown architecture", ValueError),
    ],
)
def test_missing_memory_is_reported(
    vllm: ScriptedVllm, tmp_path: Path, words: str, error: type[Exception]
) -> None:
    vllm.error = ValueError(words)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    with pytest.raises(error) as raised:
        Engine(tmp_path, EngineConfig(), device="cpu", max_model_len=64, seed=0)
    assert type(raised.value) is error
    assert words in str(raised.value)


class ScriptedLLM:
    """vLLM whose prefix cache is reset, or not."""

    def __init__(self, is_reset: bool) -> None:
        self.is_reset = is_reset

    def reset_prefix_cache(self) -> bool:
        return self.is_reset


@pytest.mark.parametrize(
    ("caching", "is_reset", "fails"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_prefix_cache_that_is_kept_is_an_error(
    asked: dict[str, Any], tmp_path: Path, caching: bool, is_reset: bool, fails: bool
) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    engine = Engine(tmp_path, EngineConfig(prefix_caching=caching), device="cpu", max_model_len=64, seed=0)
    assert asked["enable_prefix_caching"] is caching
    engine.llm = ScriptedLLM(is_reset)
    if fails:
        with pytest.raises(WeightSyncError, match="kept its prefix cache"):
            engine.forget_prefixes()
    else:
        engine.forget_prefixes()
