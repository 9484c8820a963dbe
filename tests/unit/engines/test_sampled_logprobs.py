"""Log-probabilities that are taken from vLLM step by step; its scheduler is scripted here.

- a token gets the number of its own row, in whatever order the scheduler returns the requests
- a request that has ended, or gets no token in a step, gets no number
- requests that did not ask for log-probabilities have none, and a step without any is left alone
- the scheduler gets none, so it makes no objects for them; what it returns is passed on
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_core.engines.vllm import take_logprobs


class ScriptedScheduler:
    """Returns the outputs that a test has set."""

    def __init__(self) -> None:
        self.outputs: dict[int, Any] = {}
        self.seen: list[Any] = []

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, Any]:
        self.seen.append((scheduled, sampled.logprobs))
        return self.outputs


class Llm:
    """A vLLM engine with these requests, some of which ask for log-probabilities."""

    def __init__(self, **asks: bool) -> None:
        self.scheduler = ScriptedScheduler()
        self.states = {
            name: SimpleNamespace(
                logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[]) if wants else None)
            )
            for name, wants in asks.items()
        }
        core = SimpleNamespace(scheduler=self.scheduler)
        take_logprobs(
            SimpleNamespace(
                engine_core=SimpleNamespace(engine_core=core),
                output_processor=SimpleNamespace(request_states=self.states),
            )
        )

    def step(self, rows: list[str], numbers: list[float] | None, tokens: dict[str, list[int]]) -> Any:
        """The runner samples `rows` with these log-probabilities, the scheduler returns `tokens`."""
        outputs = [SimpleNamespace(request_id=name, new_token_ids=ids) for name, ids in tokens.items()]
        self.scheduler.outputs = {0: SimpleNamespace(outputs=outputs)} if outputs else {}
        logprobs = None
        if numbers is not None:
            logprobs = SimpleNamespace(logprobs=np.array(numbers, np.float32)[:, None])
        sampled = SimpleNamespace(
            logprobs=logprobs, req_id_to_index={name: row for row, name in enumerate(rows)}
        )
        return self.scheduler.update_from_output("scheduled", sampled)

    def found(self, name: str) -> list[float]:
        numbers: list[float] = self.states[name].logprobs_processor.logprobs.logprobs
        return numbers


def test_a_token_gets_the_number_of_its_row() -> None:
    llm = Llm(a=True, b=True)
    llm.step(["a", "b"], [-1.0, -2.0], {"b": [7], "a": [8]})
    llm.step(["b", "a"], [-3.0, -4.0], {"a": [7], "b": [8]})
    assert llm.found("a") == [-1.0, -4.0]
    assert llm.found("b") == [-2.0, -3.0]


def test_only_accepted_tokens_get_a_number() -> None:
    llm = Llm(a=True, b=True, c=True)
    llm.step(["a", "b", "c"], [-1.0, -2.0, -3.0], {"a": [7], "c": []})
    llm.step(["a", "b", "c"], [-4.0, -5.0, -6.0], {"c": [7], "gone": [8]})
    llm.step(["a", "b", "c"], [-7.0, -8.0, -9.0], {})
    assert (llm.found("a"), llm.found("b"), llm.found("c")) == ([-1.0], [], [-6.0])


def test_requests_that_ask_for_none_have_none() -> None:
    llm = Llm(a=True, b=False)
    llm.step(["b", "a"], [-1.0, -2.0], {"a": [7], "b": [8]})
    assert llm.found("a") == [-2.0]
    llm.step(["b"], None, {"b": [7]})
    assert llm.states["b"].logprobs_processor.logprobs is None
    assert llm.found("a") == [-2.0]


def test_the_scheduler_gets_no_log_probabilities() -> None:
    llm = Llm(a=True)
    result = llm.step(["a"], [-1.0], {"a": [7]})
    assert result is llm.scheduler.outputs
    assert llm.scheduler.seen == [("scheduled", None)]
