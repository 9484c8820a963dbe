"""Allowed ranges of numbers, in addition to the limits of the fields' types.

The types limit every number to 10^9. This table has narrower limits where such a number would exhaust the
memory, cause an endless loop or an error late in the run. Numbers outside these ranges are typing errors or
attacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlhf_core.config.redact import shown
from rlhf_core.config.schema import Keys


class Range(NamedTuple):
    """The smallest and largest allowed value, and the reason."""

    low: float
    high: float
    reason: str


_RANKS = Range(1, 4096, "each is a separate process")
_ENGINES = Range(1, 1024, "each is a process with a copy of the policy")
_SECONDS = Range(0.1, 1e8, "shorter times end before any work is done, longer times never end")
_PAUSE = Range(0.001, 1e6, "seconds between two attempts")
_RATE = Range(1e-20, 100, "no training of a language model converges above it")
_SYNTHETIC = Range(1, 2_000_000, "examples are held in memory, about 2 KiB each")
_TEMPERATURE = Range(0.01, 100, "vLLM raises lower values to 0.01, so engine and trainer would differ")
_BATCH = Range(1, 1_000_000, "the sequences of a batch are held in memory")
_TOKENS = Range(1, 2**24, "tokens of a sequence or of one forward pass")
_RANK_R = Range(1, 8192, "wider than the layers of any model")
_TRIES = Range(0, 1000, "a longer failure requires manual action")

RANGES: dict[str, Range] = {
    "run.threads": Range(0, 4096, "more threads than cores are slower"),
    "run.retries": _TRIES,
    "run.retry_delay": _PAUSE,
    "run.stage_timeout": Range(1, 5e8, "a stage needs seconds to start"),
    "run.timeouts.start": _SECONDS,
    "run.timeouts.stall": _SECONDS,
    "run.timeouts.sync": _SECONDS,
    "model.tiny.hidden_size": Range(1, 65536, "wider than any model"),
    "model.tiny.intermediate_size": Range(1, 2**19, "wider than any model"),
    "model.tiny.layers": Range(1, 1024, "deeper than any model"),
    "model.tiny.vocab_size": Range(1, 2**21, "larger than any vocabulary"),
    "model.tiny.max_positions": _TOKENS,
    "data.synthetic.sft_examples": _SYNTHETIC,
    "data.synthetic.pairs": _SYNTHETIC,
    "data.synthetic.prompts": Range(1, 1440, "the task has 1,440 different prompts"),
    "data.max_prompt_tokens": _TOKENS,
    "data.max_response_tokens": _TOKENS,
    "data.max_text_tokens": _TOKENS,
    "data.eval_fraction": Range(0, 0.9, "the remaining prompts are used for training"),
    "data.min_rows": Range(0, 10**8, "rows are held in memory"),
    "ppo.prompts_per_step": _BATCH,
    "ppo.samples_per_prompt": Range(1, 65536, "the sequences of a batch are held in memory"),
    "ppo.minibatches": _BATCH,
    "ppo.max_new_tokens": _TOKENS,
    "ppo.micro_batch_tokens": _TOKENS,
    "ppo.temperature": _TEMPERATURE,
    "ppo.reference_ranks": _RANKS,
    "ppo.reward_ranks": _RANKS,
    "ppo.engine.count": _ENGINES,
    "ppo.engine.tensor_parallel": Range(1, 256, "GPUs of one engine"),
    "ppo.engine.max_num_seqs": Range(1, 65536, "each sequence needs memory"),
    "ppo.engine.max_restarts": _TRIES,
    "ppo.weight_sync.bucket_mib": Range(1, 16384, "a bucket is held twice in memory"),
    "ppo.dynamic_filtering.max_rounds": Range(1, 100, "each round samples a whole batch"),
    "evaluate.temperature": _TEMPERATURE,
    "evaluate.bootstrap": Range(
        1, 200_000, "intervals no longer change, and each resample is held in memory"
    ),
    "evaluate.confidence": Range(
        0.5, 0.999, "no interval has the level 1, and levels below 0.5 are not useful"
    ),
    "evaluate.samples": Range(1, 10_000, "rows of one table"),
    "register.alpha": Range(
        1e-6, 0.5, "the probability of a wrong champion; 0 allows no champion, and above 0.5 chance decides"
    ),
    "ppo.guards.loops_share": Range(0.001, 1, "a share of the responses"),
    "ppo.guards.score_length_correlation": Range(0.01, 1, "smaller correlations occur by chance"),
    **{f"{stage}.deepspeed.ranks": _RANKS for stage in ("sft", "reward")},
    **{f"ppo.{role}_deepspeed.ranks": _RANKS for role in ("policy", "critic")},
    **{f"{stage}.batch_size": _BATCH for stage in ("sft", "reward", "ppo.ptx")},
    **{f"{stage}.micro_batch_tokens": _TOKENS for stage in ("sft", "reward")},
    **{f"{stage}.lora.{field}": _RANK_R for stage in ("sft", "reward", "ppo") for field in ("r", "alpha")},
    **{
        f"{section}.learning_rate": _RATE
        for section in ("sft.optimizer", "reward.optimizer", "ppo.policy", "ppo.critic")
    },
    "ppo.rewards.*.timeout": Range(0.01, 1e6, "shorter times end before an answer, longer times never end"),
    "ppo.rewards.*.retries": _TRIES,
    "ppo.rewards.*.backoff": _PAUSE,
    "ppo.rewards.*.breaker_seconds": _PAUSE,
    "ppo.rewards.*.concurrency": Range(1, 1024, "connections to one service"),
    "ppo.rewards.*.items_per_request": Range(1, 65536, "a request has at most 16 MiB"),
}
"""Ranges by field. `*` is an index."""


def out_of_range(tree: Any, path: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Yield path and message for each number in `tree` that its type allows but this table does not."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from out_of_range(value, (*path, key))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        field = ".".join(map(str, path))
        found = RANGES.get(".".join("*" if isinstance(key, int) else key for key in path))
        # Values that the type refuses (0, negative, above 10^9, NaN) are reported by the rule of the type.
        if found is not None and 0 < tree <= 1e9 and not found.low <= tree <= found.high:
            fix = (
                f"use {number(found.low)} or more"
                if tree < found.low
                else f"use at most {number(found.high)}"
            )
            yield (
                path,
                (
                    f"{field}: must be from {number(found.low)} to {number(found.high)} ({found.reason}); "
                    f"got {shown(tree)}; {fix}"
                ),
            )


def number(value: float) -> str:
    """Return a limit as it is written in a configuration: 1000000, not 1e+06."""
    return str(int(value)) if float(value).is_integer() and value < 1e12 else f"{value:g}"
