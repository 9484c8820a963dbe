"""Log-probabilities that are taken from the scheduler that vLLM uses on GPUs (`take_logprobs`).

It schedules a step before it has read the tokens of the one before; on CPUs vLLM has another one. Scheduler,
requests and outputs are vLLM's own, and the model is scripted: a token alone determines its number.

- each token has its own number, also if requests are preempted, aborted, or end by a stop token, while a step
  is computed
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rlhf_core.engines.vllm import take_logprobs
from tests.support.tiny_llama import save_tiny_llama

BLOCK, BLOCKS = 16, 9
STOP = 5


def number_of(token: int) -> float:
    return -token / 8


class Vllm:
    """vLLM without a model, whose KV cache has few blocks."""

    def __init__(self, model: Path) -> None:
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_model_len=64, is_encoder_decoder=False, max_num_seqs=8, max_num_batched_tokens=512
            ),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        cache = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler = AsyncScheduler(
            config,
            KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], cache)]),
            StructuredOutputManager(config),
            BLOCK,
        )
        self.processor = OutputProcessor(tokenizer=None, log_stats=False)
        core: Any = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        take_logprobs(SimpleNamespace(engine_core=core, output_processor=self.processor))
        self.chance = random.Random(0)
        self.outputs: dict[str, Any] = {}
        self.preempted = 0
        """Number of preemptions."""

    def add(self, name: str, length: int) -> None:
        parameters = SamplingParams(
            max_tokens=length,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=[STOP],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[3] * 12,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, None))

    def abort(self, name: str) -> None:
        self.processor.abort_requests([name], internal=True)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, abort: str, at: int) -> None:
        """Make all steps; while a step is computed, the next one is scheduled."""
        computed: deque[tuple[Any, ModelRunnerOutput]] = deque()
        step = 0
        while self.scheduler.has_requests() or computed:
            if self.scheduler.has_requests():
                scheduled = self.scheduler.schedule()
                self.preempted += len(scheduled.preempted_req_ids or ())
                computed.append((scheduled, self.compute(list(scheduled.num_scheduled_tokens))))
                step += 1
                if step == at:
                    self.abort(abort)
            if len(computed) == 2 or not self.scheduler.has_requests():
                outputs = self.scheduler.update_from_output(*computed.popleft())
                for core_outputs in outputs.values():
                    done = self.processor.process_outputs(core_outputs.outputs)
                    self.outputs |= {output.request_id: output.outputs[0] for output in done.request_outputs}

    def compute(self, names: list[str]) -> ModelRunnerOutput:
        """Sample a token of each request, whose rows are in another order in each step."""
        self.chance.shuffle(names)
        tokens = [self.chance.randrange(STOP, 100) for _ in names]
        numbers = np.array([[number_of(token)] for token in tokens], np.float32)
        lists = LogprobsLists(np.array(tokens)[:, None], numbers, np.ones(len(names), int)) if names else None
        rows = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(names, rows, [[token] for token in tokens], lists)


def test_each_token_has_its_own_number(tmp_path: Path) -> None:
    vllm = Vllm(save_tiny_llama(tmp_path / "model", max_position_embeddings=64))
    for i in range(8):
        vllm.add(f"r{i}", 40)
    vllm.run(abort="r7", at=12)
    assert vllm.preempted
    assert sorted(vllm.outputs) == ["r0", "r1", "r2", "r3", "r4", "r5", "r6"]
    for output in vllm.outputs.values():
        assert list(output.logprobs.logprobs) == [number_of(token) for token in output.token_ids]
    reasons = {output.finish_reason for output in vllm.outputs.values()}
    assert reasons == {"stop", "length"}
