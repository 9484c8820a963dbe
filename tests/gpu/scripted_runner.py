"""An executor of vLLM without a GPU, for `tests.gpu.against_wheels`.

Scheduler, batch queue, sampler, requests and outputs are vLLM's own, with its configuration for CUDA. The
model is scripted: the logits after a token follow from this token and the version of the weights alone. So
the log-probability of each token of a response is known, whatever was computed with it.

vLLM's kernels run in Triton's interpreter, apart from the one that draws a token. `prepare` has to be called
before vLLM is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from typing_extensions import override

BLOCK = 16
"""Tokens of a block of the KV cache."""


def prepare() -> None:
    """Set the variables that Triton and vLLM read when they are imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    # vLLM uses Triton without a driver if it is told that there are no devices.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@cache
def logits_after(vocabulary: int, version: int) -> torch.Tensor:
    """Return the logits after each token (vocabulary, vocabulary) with the weights of a version."""
    generator = torch.Generator().manual_seed(version)
    return (2 * torch.randn(vocabulary, vocabulary, generator=generator)).to(torch.bfloat16)


def executor_class(blocks: int) -> Any:
    """Return a class that stands for vLLM's `UniProcExecutor`.

    Args:
        blocks: Size of the KV cache in blocks.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class ScriptedExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM has no types here
        def _init_executor(self) -> None:
            self.driver_worker = ScriptedWorker(self.vllm_config, blocks)

    return ScriptedExecutor


class HostBuffer:
    """Stands for vLLM's `UvaBuffer`, which is host memory that a GPU reads."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        # A copy: vLLM overwrites the buffer when the GPU has read it.
        return self.cpu[:n].clone()


class _Kernels(ModuleType):
    """Stands for a module of compiled kernels, which none of the code here calls."""

    __all__ = ()

    @override
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_options: False


def _replace_kernels() -> None:
    """Let vLLM's modules be imported without kernels, which need the library of the driver."""
    import vllm._custom_ops as kernels

    for name in [name for name in vars(kernels) if "support" in name]:
        setattr(kernels, name, lambda *_args: False)
    sys.modules["vllm.vllm_flash_attn"] = _Kernels("vllm.vllm_flash_attn")


class ScriptedWorker:
    """What the executor calls. Other methods do nothing."""

    def __init__(self, config: Any, blocks: int) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._cache = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        self._blocks = blocks
        self.runner = ScriptedRunner(config)

    def get_kv_cache_spec(self) -> Any:
        return {"layer": self._cache}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def determine_available_memory(self) -> int:
        return self._blocks * int(self._cache.page_size_bytes)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def compile_or_warm_up_model(self) -> Any:
        return SimpleNamespace(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduled: Any) -> Any:
        return self.runner.execute_model(scheduled)

    def sample_tokens(self, _grammar: Any) -> Any:
        return self.runner.sample_tokens()

    def finish_weight_update(self) -> None:
        self.runner.version += 1

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None


class ScriptedRunner:
    """Does what vLLM's second model runner does around the model: slots, order of the batch, positions."""

    def __init__(self, config: Any) -> None:
        _replace_kernels()
        from vllm.v1.worker.gpu import buffer_utils
        from vllm.v1.worker.gpu.sample import sampler
        from vllm.v1.worker.gpu.states import RequestState

        # Drawing a token takes most of the time in the interpreter, and any token will do.
        sampler.gumbel_sample = lambda logits, *_args, **_options: torch.multinomial(
            torch.softmax(logits.float(), -1), 1
        ).view(-1)
        buffer_utils.UvaBuffer = HostBuffer
        # The original pins the host memory.
        buffer_utils.async_tensor_h2d = lambda data, dtype, device: torch.tensor(data, dtype=dtype)
        model, scheduler = config.model_config, config.scheduler_config
        vocabulary, device = model.get_vocab_size(), torch.device("cpu")
        self.version = 0
        self.batches: list[dict[str, int]] = []
        """Tokens of each request in each step."""
        self._vocabulary = vocabulary
        self._states = RequestState(
            scheduler.max_num_seqs, model.max_model_len, scheduler.max_num_batched_tokens, 0, vocabulary,
            device,
        )  # fmt: skip
        self._sampler = sampler.Sampler(
            config, scheduler.max_num_seqs, vocabulary, device, self._states, model.logprobs_mode
        )
        self._tokens: dict[str, list[int]] = {}
        self._batch: tuple[list[str], list[int]]

    def execute_model(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

        for name in sorted(scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())):
            if name in self._tokens:
                del self._tokens[name]
                self._states.remove_request(name)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prefill_token_ids)
            self._states.add_request(
                req_id=new.req_id,
                prompt_len=new.prompt_len,
                all_token_ids=new.prefill_token_ids,
                num_computed_tokens=new.num_computed_tokens,
                max_tokens=new.sampling_params.max_tokens,
            )
            self._sampler.add_request(self._states.req_id_to_index[new.req_id], new.sampling_params)
            computed[new.req_id] = new.num_computed_tokens
        if scheduled.scheduled_new_reqs:
            self._states.apply_staged_writes()
        self._sampler.apply_staged_writes()
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if scheduled.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        tokens = scheduled.num_scheduled_tokens
        self.batches.append(dict(tokens))
        names = sort_batch_req_ids(tokens, {}, 1)
        self._batch = names, [computed[name] + tokens[name] for name in names]
        return None

    def sample_tokens(self) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names, lengths = self._batch
        slots = np.array([self._states.req_id_to_index[name] for name in names], np.int64)
        rows = np.arange(len(names) + 1, dtype=np.int32)
        last = [self._tokens[name][length - 1] for name, length in zip(names, lengths, strict=True)]
        mapping = torch.from_numpy(slots.astype(np.int32))
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        batch = SimpleNamespace(
            num_reqs=len(names),
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=slots,
            cu_num_logits=torch.from_numpy(rows),
            cu_num_logits_np=rows,
            expanded_local_pos=torch.zeros(len(names), dtype=torch.int32),
            positions=seq_lens.long() - 1,
            logits_indices=torch.arange(len(names)),
            input_ids=torch.tensor(last, dtype=torch.int32),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
        )
        sampled = self._sampler(logits_after(self._vocabulary, self.version)[last], batch)
        count = sampled.num_sampled.tolist()
        for name, token, new in zip(names, sampled.sampled_token_ids[:, 0].tolist(), count, strict=True):
            self._tokens[name] += [token] * new
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=None,
            prompt_logprobs_dict={},
        )
        return _arrived(output, sampled)


def _arrived(output: Any, sampled: Any) -> Any:
    """Return vLLM's output of a step that was copied to the host."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    made = AsyncOutput.__new__(AsyncOutput)
    vars(made).update(
        model_runner_output=output,
        copy_event=SimpleNamespace(synchronize=lambda: None),
        sampled_token_ids=sampled.sampled_token_ids.numpy(),
        num_sampled_tokens_np=sampled.num_sampled.numpy(),
        logprobs_tensors=sampled.logprobs_tensors,
        sampling_mask_tensors=None,
        num_nans=None,
        prompt_logprobs_dict={},
        prompt_token_id_logprobs_dict={},
        pending_aux_output=None,
        _has_fault=None,
    )
    return made


def check_rollouts(model: Path, vocabulary: int) -> Iterator[str]:
    """Sample with the scripted model in different ways, and compare the log-probability of each token.

    Args:
        model: Folder of a model, of which only the configuration is used.
        vocabulary: Its number of tokens.
    """
    for name, blocks, settings, options in (
        ("a KV cache for all requests", 64, {}, {}),
        ("preempted requests", 9, {}, {}),
        ("prompts in parts", 64, {}, {"max_num_batched_tokens": 24}),
        ("prompts in parts, preempted", 9, {}, {"max_num_batched_tokens": 24}),
        ("shared prefixes, preempted", 9, {"prefix_caching": True}, {"max_num_batched_tokens": 24}),
    ):
        with _engine(model, blocks, settings, options) as (engine, core):
            for problem in _wrong_rollouts(engine, vocabulary):
                yield f"{name}: {problem}"
            batches = core.model_executor.driver_worker.runner.batches
            if "max_num_batched_tokens" in options and max(sum(batch.values()) for batch in batches) > 24:
                yield f"{name}: a step had more tokens"
            if (blocks == 9) != bool(core.preempted):
                yield f"{name}: {core.preempted} preemptions"


@contextmanager
def _engine(
    model: Path, blocks: int, settings: dict[str, Any], options: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield an engine and vLLM's core of it, which counts preemptions in `preempted`."""
    import vllm

    from rlhf_core.config.ppo_sections import EngineConfig
    from rlhf_core.engines.vllm import Engine

    config = EngineConfig.model_validate({"dtype": "bfloat16", "max_num_seqs": 8, **settings})
    scripted = executor_class(blocks)
    with (
        mock.patch("vllm.v1.executor.uniproc_executor.UniProcExecutor", scripted),
        mock.patch("vllm.LLM", partial(vllm.LLM, **options)),
    ):
        engine = Engine(model, config, device="cuda", max_model_len=64, seed=0)
    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.batch_queue_size == 2, "the scheduler is not asynchronous"
    core.preempted = 0
    preempt = core.scheduler._preempt_request

    def count(*args: Any, **named: Any) -> None:
        core.preempted += 1
        preempt(*args, **named)

    core.scheduler._preempt_request = count
    yield engine, core
    engine.shutdown()


def _wrong_rollouts(engine: Any, vocabulary: int) -> Iterator[str]:
    """Sample at two temperatures."""
    from rlhf_core.types import PromptExample

    prompts = [PromptExample(f"p{i}", "", (1, *range(3, 15 + 2 * i))) for i in range(4)]
    for temperature in (1.0, 0.7):
        how = {"n": 2, "max_new_tokens": 20, "temperature": temperature}
        rollouts = engine.generate(prompts, seeds=range(4), policy_version=0, **how)
        yield from _wrong_numbers(rollouts, vocabulary, temperature)


def _wrong_numbers(rollouts: Sequence[Any], vocabulary: int, temperature: float) -> Iterator[str]:
    for rollout in rollouts:
        tokens, expected = rollout.response_ids, []
        for before, token in zip((rollout.prompt_ids[-1], *tokens), tokens, strict=False):
            logits = logits_after(vocabulary, rollout.policy_version)[before].float()
            expected.append(torch.log_softmax(logits / temperature, -1)[token].item())
        if len(expected) != len(rollout.rollout_logprobs):
            yield f"{len(rollout.rollout_logprobs)} numbers for {len(expected)} tokens"
        elif np.abs(np.subtract(expected, rollout.rollout_logprobs)).max() > 1e-4:
            yield f"other numbers than {expected}: {rollout.rollout_logprobs}"
