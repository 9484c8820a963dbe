"""Prompts, answers and models with known outputs, of the tests of the stage `evaluate`."""

import math
from collections.abc import Mapping

from tests.support.word_tokenizer import word_tokenizer

PROMPTS = [
    f"Tell me about a small {subject} {place}."
    for subject in ("fox", "cat", "dog", "bear")
    for place in ("in the garden", "on the roof")
]


def answer(model: str, prompt: str) -> str:
    rest = prompt.removeprefix("Tell me about a small ").removesuffix(".")
    if model == "model":
        return "It is rotten and dull."
    if model == "dpo":
        return f"The small {rest.split()[0]} sleeps {rest.split(' ', 1)[1]}."
    return (
        f"The small {rest.split()[0]} sleeps {rest.split(' ', 1)[1]}. It is kind and gentle. It has a warm"
        " voice."
    )


OTHER_PROMPTS = ["How are you?", "Why so?"]
WORDS = [f"good good {i}" for i in range(20)]
TOKENIZER = word_tokenizer(
    [answer(model, prompt) for model in ("model", "dpo", "policy") for prompt in (*PROMPTS, *OTHER_PROMPTS)]
    + [*PROMPTS, *WORDS]
)


LOGITS = {
    "policy": {"fox": 1.0, "cat": 2.0, "dog": 3.0, "roof.": 0.5},
    "dpo": {"sleeps": 2.0},
    "model": {"small": 1.0},
}
"""Logits of each model for the next word, whatever the previous ones are. Other words have 0."""


SCORES = {"dull.": -1.0, "garden.": 0.5, "roof.": 0.5, "voice.": 2.0}
"""The reward model's score of an answer, by its last word."""


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def by_token(values: Mapping[str, float]) -> dict[int, float]:
    return {TOKENIZER.convert_tokens_to_ids(word): value for word, value in values.items()}


def log_ratio(model: str, prompt: str) -> float:
    """Log-ratio of this policy and the SFT model for its answer, in nats."""

    def logprob(logits: Mapping[str, float]) -> float:
        log_sum = math.log(len(TOKENIZER) - len(logits) + sum(map(math.exp, logits.values())))
        return sum(logits.get(word, 0.0) - log_sum for word in answer(model, prompt).split())

    return logprob(LOGITS[model]) - logprob(LOGITS["model"])
