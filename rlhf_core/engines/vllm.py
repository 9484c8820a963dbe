"""One vLLM engine in this process: the only importer of vllm besides `engines.sync`.

The processes of an engine are on one host: `tensor_parallel=1` uses vLLM's executor `uni`, more use `mp`.
docs/clusters.md says what vLLM lacks for an engine over several hosts, which `ppo.fleet.placement` refuses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rlhf_core.config.ppo_sections import EngineConfig, engine_rank
from rlhf_core.errors import InfrastructureError, ModelError, OutOfMemory, WeightSyncError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.system.heartbeat import heartbeat
from rlhf_core.types import Numbers, PromptExample, Rollout

CPU_TOKENS_PER_STEP = 4096
"""Tokens per scheduler step of an engine on the CPU, if no sequence is longer. This is vLLM's default there.
"""
_MAX_EAGER_VOCABULARY = 8192
"""Largest vocabulary for which the ranks of sampled tokens, which are not used, are counted without code that
torch compiles. Counting is slower, but compiling takes seconds at each start of an engine.
"""
_EXTENSION = "rlhf_core.engines.sync.receiver.SyncExtension"


class SamplingOptions(TypedDict):
    """What all requests of a call have in common.

    Only the temperature changes the distribution: with top-p or top-k, the log-probabilities of PPO would be
    wrong.
    """

    n: int
    """Responses to each prompt. They are one request with one seed, to which vLLM adds the index of the
    sample.
    """
    max_new_tokens: int
    """Length limit of a response."""
    temperature: float
    """Temperature of the softmax."""


class Engine:
    """Samples responses.

    The same prompts, seeds and weights give the same tokens, on the CPU the same bits.
    """

    def __init__(
        self,
        model: Path,
        engine: EngineConfig,
        *,
        device: str,
        max_model_len: int,
        seed: int,
        weight_transfer: str | None = None,
        adapter_rank: int | None = None,
        head_dtype: str = "model",
        sleep_level: Literal[0, 1, 2] = 0,
    ) -> None:
        """Start an engine.

        Args:
            model: A Hugging Face folder. An `eos_token_id` of its two configurations ends a response.
            engine: Memory, parallelism and precision.
            device: "cpu" or "cuda".
            max_model_len: Tokens of a prompt and its response, at most.
            seed: Seed of vLLM. Each request has its own seed.
            weight_transfer: Backend of weight sync: gloo, nccl, ipc; "files" for `load_weights`.
            adapter_rank: If the updated weights are those of an adapter on `model`, its rank.
            head_dtype: Precision of the logits. With "float32" they are not rounded.
            sleep_level: On a GPU, whether the engine can `sleep`, and how.

        Raises:
            ModelError: config.json has no `eos_token_id`.
        """
        config = ModelFolder(model).config
        _set_environment(engine, device, config.get("vocab_size"))
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig

        eos = config.get("eos_token_id")
        if eos is None:
            raise ModelError(f"{model}/config.json: eos_token_id is missing; without it no response can end")
        self._stop_ids = list(eos) if isinstance(eos, list) else [eos]
        # By default vLLM starts workers with Ray if it runs in an actor, but the placement group has no
        # bundles for them. The workers of `mp` use the visible devices of this process in order.
        executor = "uni" if engine.tensor_parallel == 1 else "mp"
        options: dict[str, Any] = {"distributed_executor_backend": executor}
        if weight_transfer is not None:
            options["weight_transfer_config"] = WeightTransferConfig(backend=f"rlhf_{weight_transfer}")
            options["worker_extension_cls"] = _EXTENSION
        if adapter_rank is not None:
            size = engine_rank(adapter_rank)
            options |= {"enable_lora": True, "max_lora_rank": size, "max_loras": 1, "max_cpu_loras": 1}
        if head_dtype == "float32":
            options["hf_overrides"] = {"head_dtype": "float32"}
        options |= _device_options(engine, device, max_model_len)
        self._sleep_level = sleep_level
        options["enable_sleep_mode"] = sleep_level > 0
        with _errors_about_memory():
            self.llm = LLM(
                model=str(model),
                skip_tokenizer_init=True,
                dtype=engine.dtype,
                tensor_parallel_size=engine.tensor_parallel,
                enforce_eager=engine.enforce_eager,
                max_model_len=max_model_len,
                max_num_seqs=engine.max_num_seqs,
                # Seeds here have 63 bits. vLLM also seeds numpy, which takes 32.
                seed=seed & 0x7FFFFFFF,
                enable_prefix_caching=engine.prefix_caching,
                disable_log_stats=True,
                # Not the sampling defaults of the folder, such as top_p. Its EOS tokens are read anyway.
                generation_config="vllm",
                # At the temperature, as the trainer computes them. By default those before it are returned.
                logprobs_mode="processed_logprobs",
                trust_remote_code=False,
                **options,
            )

        self._prefix_caching = engine.prefix_caching
        self._max_num_seqs = engine.max_num_seqs
        self.steps = 0
        """Scheduler steps so far; each decodes one token of every running sequence."""
        self.llm.llm_engine.step = self._counted(self.llm.llm_engine.step)
        if engine.tensor_parallel == 1:
            # With more, the scheduler is in another process, and vLLM's own code is used (decision 45).
            take_logprobs(self.llm.llm_engine)

    def generate(
        self,
        prompts: Sequence[PromptExample],
        *,
        seeds: Sequence[int],
        policy_version: int,
        adapter: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Rollout]:
        """Sample responses to each prompt, in the order of prompts, then of samples.

        Args:
            prompts: All are sampled at the same time.
            seeds: One per prompt.
            policy_version: Is stored in the rollouts.
            adapter: The number with which `SyncExtension.load_adapter` loaded the adapter.
            options: See `SamplingOptions`.
        """
        outputs = self.llm.generate(
            [_tokens(prompt) for prompt in prompts],
            [self._parameters(seed, options) for seed in seeds],
            use_tqdm=False,
            lora_request=_adapter(adapter),
        )
        rollouts: list[Rollout] = []
        for prompt, output in zip(prompts, outputs, strict=True):
            rollouts += _rollouts(prompt, output, policy_version)
        return rollouts

    def _parameters(self, seed: int, options: SamplingOptions) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=options["n"],
            temperature=options["temperature"],
            # vLLM adds the index of the sample to it, so that the samples of a prompt differ.
            seed=seed & 0x7FFFFFFF,
            max_tokens=options["max_new_tokens"],
            # Of the sampled token alone.
            logprobs=0,
            flat_logprobs=True,
            # Without a tokenizer vLLM knows no EOS tokens but those of generation_config.json.
            stop_token_ids=self._stop_ids,
            detokenize=False,
        )

    def choose(self, prompts: Sequence[Sequence[int]], choices: Sequence[int]) -> list[int]:
        """Return the most probable of the tokens `choices` after each prompt (n,)."""
        from vllm import SamplingParams, TokensPrompt

        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(choices), detokenize=False
        )
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts], parameters, use_tqdm=False
        )
        return [output.outputs[0].token_ids[0] for output in outputs]

    def _counted(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return vLLM's `step` with a counter, and with a heartbeat, so that an engine with a long batch does
        not count as stalled.
        """

        def run() -> Any:
            heartbeat("decode")
            self.steps += 1
            return step()

        return run

    def forget_prefixes(self) -> None:
        """Forget the KV cache of prompts. No request may be alive."""
        if self._prefix_caching and not self.llm.reset_prefix_cache():
            raise WeightSyncError("vLLM kept its prefix cache after a sync or an evaluation")

    def load_weights(self, folder: Path) -> dict[str, str]:
        """Replace the weights by those of a model folder with the same configuration and tensors.

        No request may be alive. The engine must have been started with `weight_transfer="files"`. Returns the
        checksum of each tensor that was loaded (`sync.wire.tensor_checksum`).
        """
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"folder": str(folder)}})
        self.llm.finish_weight_update()
        # Cached keys and values of prompts are those of the weights before.
        self.forget_prefixes()
        return self.received_checksums()

    def received_checksums(self) -> dict[str, str]:
        """Return the checksum of each tensor of the last update. All workers of an engine must agree."""
        received: list[dict[str, str]] = self.llm.collective_rpc("received_checksums")
        merged = dict(received[0])
        for other in received[1:]:
            # Equal to no checksum, so that `sync.wire.verify` names the tensor.
            merged.update({name: "workers differ" for name in merged if other.get(name) != merged[name]})
        return merged

    def load_adapter(self, number: int, folder: Path) -> None:
        """Load the adapter in `folder` (PEFT's layout) under this number."""
        from vllm.lora.request import LoRARequest

        self.llm.llm_engine.add_lora(LoRARequest(f"policy-{number}", number, str(folder)))

    def sleep(self) -> None:
        """Give the memory of the weights and of the KV cache back to the device.

        At level 1 the weights are kept in host memory, at level 2 they are lost. Addresses stay valid, and
        with them CUDA graphs.
        """
        self.llm.sleep(level=self._sleep_level)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate the memory of a part again. The engine samples after both parts are there."""
        self.llm.wake_up(tags=[part])

    def shutdown(self) -> None:
        """Free the model and its KV cache."""
        import gc

        # First, while the engine still refers to the model: hooks of torch.compile would keep its weights on
        # the device.
        unhook = getattr(self.llm.llm_engine, "_finalizer", None)
        if unhook is not None:
            unhook()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def _tokens(prompt: PromptExample) -> Any:
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=list(prompt.input_ids))


def _adapter(number: int | None) -> Any:
    from vllm.lora.request import LoRARequest

    # The path does not exist, so an adapter that no sync has loaded is an error.
    return None if number is None else LoRARequest(f"policy-{number}", number, "not-synced")


def _rollouts(prompt: PromptExample, output: Any, policy_version: int) -> list[Rollout]:
    """Return the samples of a finished request in order."""
    rollouts = []
    for sample in sorted(output.outputs, key=lambda sample: sample.index):
        rollout = Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=sample.index,
            prompt_ids=tuple(prompt.input_ids),
            response_ids=Numbers.of(sample.token_ids),
            rollout_logprobs=Numbers.of(sample.logprobs.logprobs, "float32"),
            finished=sample.finish_reason == "stop",
            policy_version=policy_version,
        )
        rollouts.append(rollout)
    return rollouts


def _device_options(engine: EngineConfig, device: str, max_model_len: int) -> dict[str, Any]:
    if device == "cuda":
        return {"gpu_memory_utilization": engine.gpu_memory_utilization}
    # If a prompt is split over two scheduler steps, vLLM rewinds its seeded generator, which a CPU generator
    # does not support. With this budget, whole sequences always fit, including preempted sequences that are
    # computed again.
    budget = max(CPU_TOKENS_PER_STEP, max_model_len, engine.max_num_seqs)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": budget}


_NO_CACHE = ("available memory for the cache blocks", "To serve at least one request")
_TAKEN = (
    "less than desired GPU memory utilization",
    "is less than requested memory for kv",
    "Error in memory profiling",  # another process freed memory during the measurement
)
"""Parts of vLLM's error messages for too little memory, and for memory that other processes use. vLLM raises
them as ValueError or AssertionError.
"""


@contextmanager
def _errors_about_memory() -> Iterator[None]:
    """Raise the error of the project for an error of vLLM about memory."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        text = " ".join(str(error).split())
        if any(part in text for part in _TAKEN):
            raise OutOfMemory(f"an engine has too little memory: {text[:300]}") from error
        if any(part in text for part in _NO_CACHE):
            raise InfrastructureError(
                f"an engine has too little memory for its KV cache ({text[:200]}); raise"
                " ppo.engine.gpu_memory_utilization (GPU) or ppo.engine.kv_cache_gib (CPU), or have shorter"
                " sequences"
            ) from error
        raise


def take_logprobs(llm_engine: Any) -> None:
    """Let vLLM's engine, which runs in this process, return log-probabilities without its own code for them.

        model runner --> tokens of a step, and one array of their log-probabilities
                            |                             |
                            v                             v
                       scheduler --> outputs --> here: one list operation for each output --> `FlatLogprobs`

    vLLM itself cuts the arrays of a step into three arrays for each request, and appends to six lists for
    each token. It takes longer than the computation of the log-probabilities (docs/decisions/0045).

    Afterwards `CompletionOutput.logprobs` of a request with `logprobs=0` and `flat_logprobs=True` has only
    the list `logprobs`, with one number for each token. No request may ask for more log-probabilities, or
    for those of its prompt, or have a stop string.
    """
    scheduler = llm_engine.engine_core.engine_core.scheduler
    states = llm_engine.output_processor.request_states
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, sampled: Any) -> Any:
        logprobs, sampled.logprobs = sampled.logprobs, None
        outputs = update(scheduled, sampled)
        # Outputs are by client, and an engine in this process has only client 0.
        if logprobs is not None and 0 in outputs:
            _append(outputs[0].outputs, states, sampled.req_id_to_index, logprobs)
        return outputs

    scheduler.update_from_output = update_from_output


def _append(outputs: Any, states: Any, rows: dict[str, int], logprobs: Any) -> None:
    """Append the log-probabilities of the tokens that the scheduler has accepted.

    It returns none for a request that has ended after the step was scheduled. A request that was preempted
    meanwhile keeps its token.
    """
    # vLLM has the sampled token in column 0, and the most probable ones behind it.
    of_sampled = logprobs.logprobs[:, 0].tolist()
    for output in outputs:
        # A request that was aborted has none.
        state = states.get(output.request_id)
        if state is not None and state.logprobs_processor.logprobs is not None:
            row = rows[output.request_id]
            new = of_sampled[row : row + len(output.new_token_ids)]
            state.logprobs_processor.logprobs.logprobs.extend(new)


def import_vllm(engine: EngineConfig, device: str, vocabulary: int | None) -> None:
    """Import ahead what an engine imports when it starts.

    `vocabulary` is the size of the vocabulary if it is known.
    """
    _set_environment(engine, device, vocabulary)
    import vllm.lora.request
    from vllm import LLM  # noqa: F401

    if device == "cpu":
        import vllm.v1.worker.cpu_worker  # noqa: F401


def _set_environment(engine: EngineConfig, device: str, vocabulary: int | None) -> None:
    """Set the variables that vLLM reads when it is imported."""
    # A user may set these to look for a fault. By default vLLM sends statistics of its use over the network.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if engine.tensor_parallel == 1:
        # No separate engine process, which could die alone; and it starts in 5 s instead of 26 s.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if device == "cuda":
        # Our requests have seeds, with which vLLM does not use this sampler; but it would import flashinfer,
        # or compile kernels.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if engine.dtype == "float32":
            # Triton's attention would multiply in TF32, and the canary compares float32 with 1e-3.
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if device == "cpu":
        # By default each engine would bind its threads to the same cores.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # vLLM reads whole GiB.
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(engine.kv_cache_gib)))
        if engine.enforce_eager and vocabulary is not None and vocabulary <= _MAX_EAGER_VOCABULARY:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
