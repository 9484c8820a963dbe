"""A vLLM engine whose responses are scripted.

from rlhf_core.testing.engines import Reply, scripted_engines

with scripted_engines(lambda request: Reply((7, 8, 2))) as engines:
    rollouts = sample_responses(config, PolicyFiles(folder), prompts, device="cpu", done=print)
assert rollouts[0].response_ids == (7, 8, 2)
assert engines[0].requests[0].temperature == config.evaluation_temperature
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack
from unittest import mock

from typing_extensions import override

from rlhf_core.engines.sync.wire import folder_checksums
from rlhf_core.engines.vllm import Engine, SamplingOptions
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import Numbers, PromptExample, Rollout


@dataclass(frozen=True)
class Request:
    """One response that an engine was asked for."""

    prompt: PromptExample
    sample_index: int
    seed: int
    """Seed of the prompt, the same for all its samples."""
    temperature: float
    max_new_tokens: int
    model: Path
    """Model folder of the engine."""
    adapter: int | None
    """Number of the adapter that the request uses."""


@dataclass(frozen=True)
class Reply:
    """A scripted response."""

    token_ids: Sequence[int]
    """(T,) At most `max_new_tokens` of them are used."""
    finished: bool = True
    """False for a response without EOS. A response that is cut is never finished."""


Respond = Callable[[Request], Reply]


class ScriptedEngine(Engine):
    """An engine that does not load a model. Log-probabilities of its tokens are 0.

    Args:
        respond: Called for each response.
        model: Model folder, for `Request.model`.
        options: Keyword arguments of the start of the engine, for tests.
    """

    def __init__(
        self, respond: Respond, model: Path | None = None, options: dict[str, Any] | None = None
    ) -> None:
        # Not the constructor of the base class, which starts vLLM.
        self._respond = respond
        self._model = model or Path("model")
        self.options = options or {}
        self.requests: list[Request] = []
        self.adapters: dict[int, Path] = {}
        """Folder of each loaded adapter by number."""
        self.checksums: dict[str, str] = {}
        """Checksums of the tensors that `load_weights` loaded last, by name."""
        self.steps = 0
        """Tokens of the longest reply of each call so far."""
        self.asleep: set[str] = set()
        """Parts of the memory that `sleep` has freed: `weights`, `kv_cache`."""
        self.prefix_resets = 0
        """How often `forget_prefixes` was called."""
        self.is_shut_down = False

    @override
    def generate(
        self,
        prompts: Sequence[PromptExample],
        *,
        seeds: Sequence[int],
        policy_version: int,
        adapter: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Rollout]:
        """Return `n` rollouts for each prompt, in order, as the real engine does.

        Args:
            prompts: The prompts.
            seeds: One for each prompt.
            policy_version: Recorded in each rollout.
            adapter: Number of the adapter to sample with; it must have been loaded.
            options: See `SamplingOptions`. Longer replies than `max_new_tokens` are cut. The temperature is
                passed on to `respond` in the request.

        Raises:
            ValueError: If `adapter` is not loaded.
            RuntimeError: If the engine sleeps.
        """
        if adapter is not None and adapter not in self.adapters:
            raise ValueError(f"adapter {adapter} is not loaded")
        self._check_awake()
        temperature, max_new_tokens = options["temperature"], options["max_new_tokens"]
        rollouts = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            for index in range(options["n"]):
                request = Request(prompt, index, seed, temperature, max_new_tokens, self._model, adapter)
                self.requests.append(request)
                reply = self._respond(request)
                ids = Numbers.of(reply.token_ids[:max_new_tokens])
                rollout = Rollout(
                    prompt_id=prompt.prompt_id,
                    sample_index=index,
                    prompt_ids=tuple(prompt.input_ids),
                    response_ids=ids,
                    rollout_logprobs=Numbers.of([0.0] * len(ids), "float32"),
                    finished=reply.finished and len(ids) == len(reply.token_ids),
                    policy_version=policy_version,
                )
                rollouts.append(rollout)
        self.steps += max((len(rollout.response_ids) for rollout in rollouts), default=0)
        return rollouts

    @override
    def choose(self, prompts: Sequence[Sequence[int]], choices: Sequence[int]) -> list[int]:
        """Return the first token of the reply to each prompt. The prompt of its request has only tokens."""
        self._check_awake()
        self.steps += 1
        chosen = []
        for prompt in prompts:
            example = PromptExample("", "", tuple(prompt), {})
            request = Request(example, 0, 0, 0.0, 1, self._model, None)
            self.requests.append(request)
            chosen.append(self._respond(request).token_ids[0])
        return chosen

    @override
    def load_weights(self, folder: Path) -> dict[str, str]:
        """Let later requests be of the model in `folder`, and return the checksums of its tensors. The
        failpoint `weight_sync.load` drops a tensor, as in the real engine.
        """
        self._model = folder
        checksums = folder_checksums(folder)
        dropped = {name for name in checksums if failpoint("weight_sync.load", "drop") == "drop"}
        self.checksums = {name: value for name, value in checksums.items() if name not in dropped}
        return self.received_checksums()

    @override
    def received_checksums(self) -> dict[str, str]:
        return self.checksums

    @override
    def load_adapter(self, number: int, folder: Path) -> None:
        self.adapters[number] = folder

    @override
    def forget_prefixes(self) -> None:
        self.prefix_resets += 1

    @override
    def sleep(self) -> None:
        self.asleep = {"weights", "kv_cache"}

    @override
    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self.asleep.discard(part)

    def _check_awake(self) -> None:
        if self.asleep:
            raise RuntimeError(f"the engine sleeps: wake {' and '.join(sorted(self.asleep))} first")

    @override
    def shutdown(self) -> None:
        self.is_shut_down = True


@contextmanager
def scripted_engines(respond: Respond) -> Iterator[list[ScriptedEngine]]:
    """Replace the vLLM engine of this process. Yields the engines in the order in which they are started.

    Args:
        respond: Called for each response of every engine.
    """
    started: list[ScriptedEngine] = []

    def start(model: Path, engine: Any, **options: Any) -> ScriptedEngine:
        started.append(ScriptedEngine(respond, model, options))
        return started[-1]

    # In the module that defines it: callers import the class when they start an engine.
    with mock.patch("rlhf_core.engines.vllm.Engine", start):
        yield started
