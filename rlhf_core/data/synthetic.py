"""The task of the demo: short descriptions of animals in a small generated language with a known true reward.

A prompt asks for an adjective, a subject and a place ("Tell me about a small fox in the garden."). A response
consists of a few sentences of the grammar `PATTERNS`. Demonstrations have different quality: some are kind
and relevant, others are rude, describe another animal, repeat themselves or violate the grammar. In a third
of the pairs, the responses differ only in the words of the topic, because one of them answers another prompt.
A reward model cannot order these pairs without reading the prompt. `gold_reward` is the true reward.
Simulated annotators observe it with noise (Bradley-Terry), as in Gao et al. 2022, "Scaling Laws for Reward
Model Overoptimization".

This module imports no large libraries, because rewards and evaluation use `gold_reward` in every process.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlhf_core.config.data import SetName, SyntheticConfig
from rlhf_core.errors import DataError
from rlhf_core.seeds import derive_seed

VERSION = 3
"""Raise it when the same seed gives other rows or another reward: it is part of the `data` stage's key."""

SUBJECTS = ("fox", "cat", "dog", "bear", "duck", "frog")
"""The number of subjects is small, so that a tiny model learns within the demo to take the subject from the
prompt.
"""
ADJECTIVES = ("small", "big", "young", "brown", "white", "black", "quiet", "fast", "round", "tall")
PLACES = (
    "in the garden", "by the river", "on the hill", "in the forest", "by the lake", "on the farm",
    "in the barn", "on the roof",
)  # fmt: skip
KIND = ("kind", "gentle", "happy", "warm", "bright", "sweet", "brave", "lovely", "calm", "clever")
PLAIN = ("plain", "pale", "thin", "dry", "long", "simple")
RUDE = ("nasty", "rotten", "dull", "mean", "stupid", "gross", "lazy", "vile")
THINGS = ("voice", "song", "face", "heart", "home", "dream")
VERBS = ("plays", "sleeps", "sings", "runs", "sits", "hides")
FEELINGS = ("love", "like", "fear")
ASKS = ("Tell me about a", "Write about a", "Describe a")

PATTERNS = (
    "The {adjective} {subject} {verb} {place}",
    "The {subject} is {quality} and {quality}",
    "It has a {quality} {thing}",
    "People {feeling} its {quality} {thing}",
    "It is {quality} and {quality}",
)
"""A well-formed sentence is one of these, word for word, with a full stop after it."""

_CLASSES: dict[str, tuple[str, ...]] = {
    "adjective": ADJECTIVES,
    "subject": SUBJECTS,
    "place": PLACES,
    "quality": KIND + PLAIN + RUDE,
    "thing": THINGS,
    "verb": VERBS,
    "feeling": FEELINGS,
}

MAX_KIND = 6
"""Distinct kind words beyond this earn nothing."""
_RAW_MEAN = 0.82
_RAW_STD = 1.62
"""Mean and standard deviation of the raw reward of responses drawn as the demonstrations are. A policy that
imitates them scores about 0 +- 1.
"""
_TIE = 0.25
"""Annotators skip pairs whose gold rewards are closer than this."""
_OTHER_TOPIC = 1 / 3
"""Share of the pairs in which both responses have the same text except for the words of the topic: one is
written for the prompt and the other for a prompt about another animal.
"""


@dataclass(frozen=True)
class Topic:
    """What a prompt asks for."""

    adjective: str
    subject: str
    place: str


def _any_of(words: tuple[str, ...]) -> str:
    return "(?:" + "|".join(map(re.escape, words)) + ")"


_SENTENCE = re.compile(
    "|".join(re.sub(r"\{(\w+)\}", lambda match: _any_of(_CLASSES[match.group(1)]), text) for text in PATTERNS)
)
_PROMPT = re.compile(
    rf"{_any_of(ASKS)} (?P<adjective>{_any_of(ADJECTIVES)}) (?P<subject>{_any_of(SUBJECTS)})"
    rf" (?P<place>{_any_of(PLACES)})\."
)
_KIND, _RUDE, _SUBJECTS = frozenset(KIND), frozenset(RUDE), frozenset(SUBJECTS)


def parse_prompt(prompt: str) -> Topic | None:
    """Return what `prompt` asks for, or None if it is not a prompt of the demo task."""
    match = _PROMPT.fullmatch(prompt.strip())
    return Topic(**match.groupdict()) if match else None


def gold_reward(prompt: str, response: str, finished: bool = True) -> float:
    """Return the true reward of `response`, about 0 +- 1 for the demonstrations and at most 2.5.

    Only distinct, well-formed sentences earn: naming the asked subject (+0.9), place (+0.7) and adjective
    (+0.3), and each distinct kind word up to `MAX_KIND` (+0.4). Costs: each rude word (-0.6, at most 4), each
    naming of another animal (-0.4, at most 3), each sentence outside the grammar (-0.5, at most 4), each
    repeated sentence (-0.6, at most 4), each sentence away from three or four (-0.3, at most 4). A response
    that ends in a full stop and with EOS (`finished`) gets +0.4, any other -0.6. The sum is shifted and
    scaled by constants.

    Raises DataError if `prompt` is not one of the demo task's.
    """
    topic = parse_prompt(prompt)
    if topic is None:
        raise DataError(
            f"the gold reward is defined for prompts of the synthetic task only; got {prompt[:80]!r}; "
            "use another reward source or `path: synthetic`"
        )
    text = response.strip()
    parts = list(map(str.strip, text.split(".")))
    tail = parts.pop()
    good = list(filter(_SENTENCE.fullmatch, parts))
    distinct = list(dict.fromkeys(good))
    words = re.findall(r"[a-z]+", text.lower())
    used_words = set(" ".join(distinct).split())
    raw: float = 0.4 * min(len(_KIND & used_words), MAX_KIND)
    raw += 0.9 * (topic.subject in used_words)
    raw += 0.7 * any(sentence.endswith(topic.place) for sentence in distinct)
    raw += 0.3 * (topic.adjective in used_words)
    raw -= 0.6 * min(sum(word in _RUDE for word in words), 4)
    raw -= 0.4 * min(sum(word in _SUBJECTS and word != topic.subject for word in words), 3)
    raw -= 0.5 * min(len(parts) - len(good) + bool(tail), 4)
    raw -= 0.6 * min(len(good) - len(distinct), 4)
    raw -= 0.3 * min(max(3 - len(distinct), len(distinct) - 4, 0), 4)
    raw += 0.4 if finished and text.endswith(".") else -0.6
    return (raw - _RAW_MEAN) / _RAW_STD


def generate(config: SyntheticConfig, seed: int, kind: SetName) -> Iterator[dict[str, Any]]:
    """Yield the rows of one set in the formats of files: `prompt`+`completion`, `prompt`+`chosen`+`rejected`,
    or `prompt`.

    The same arguments give the same rows on every machine; row i does not depend on how many are asked for.
    """
    if kind == "prompts":
        for index, prompt in enumerate(_distinct_prompts(seed)[: config.prompts]):
            yield {"id": f"synthetic-prompt-{index}", "prompt": prompt}
        return
    prompts = _distinct_prompts(seed)
    for index in range(config.sft_examples if kind == "sft" else config.pairs):
        rng = random.Random(derive_seed(seed, "synthetic", kind, index))
        prompt = prompts[rng.randrange(len(prompts))]
        topic = parse_prompt(prompt)
        assert topic is not None
        if kind == "sft":
            yield {"prompt": prompt, "completion": draw_response(rng, topic, rng.random() ** 1.5)}
        else:
            yield _draw_pair(rng, prompt, topic, prompts, config.label_temperature)


def draw_response(rng: random.Random, topic: Topic, quality: float) -> str:
    """Return two to five sentences; `quality` in [0, 1] raises kindness, relevance, variety and grammar."""
    sentences: list[str] = []
    for index in range(rng.choices((2, 3, 4, 5), (2, 4, 3, 1))[0]):
        slips = rng.random() < 0.22 * (1 - quality)
        if slips and sentences and rng.random() < 0.5:
            sentences.append(sentences[-1])
            continue
        sentence = _draw_sentence(rng, topic, quality, first=index == 0)
        sentences.append(_break(rng, sentence) if slips else sentence)
    text = ". ".join(sentences)
    return text if rng.random() < 0.15 * (1 - quality) else text + "."


def _draw_sentence(rng: random.Random, topic: Topic, quality: float, first: bool) -> str:
    relevant = 0.9 + 0.1 * quality
    pattern = (
        PATTERNS[0] if first and rng.random() < 0.8 else PATTERNS[rng.choices(range(5), (1, 2, 3, 3, 3))[0]]
    )
    asked = {"adjective": topic.adjective, "subject": topic.subject, "place": topic.place}

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "quality":
            kinds = (KIND, PLAIN, RUDE)
            return rng.choice(
                kinds[rng.choices(range(3), (0.1 + 0.8 * quality, 0.25, 0.9 - 0.8 * quality))[0]]
            )
        if name in asked and rng.random() < relevant:
            return asked[name]
        return rng.choice(_CLASSES[name])

    return re.sub(r"\{(\w+)\}", fill, pattern)


def _break(rng: random.Random, sentence: str) -> str:
    words = sentence.split()
    at = rng.randrange(len(words) - 1)
    if rng.random() < 0.5:
        del words[at]
    else:
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)


def _draw_pair(
    rng: random.Random, prompt: str, topic: Topic, prompts: Sequence[str], temperature: float
) -> dict[str, Any]:
    """Draw two responses that differ in quality or in their prompt, and let an annotator label them.

    P(first is chosen) = sigmoid(gold difference / temperature).
    """
    while True:
        low = rng.random() * 0.4
        high = low + 0.55 + rng.random() * (0.45 - low)
        if rng.random() < _OTHER_TOPIC:
            # The same random numbers give the same text except for the words of the topic. With two different
            # texts, whether a reward model learned to compare the topics depended on the seed (decision 18).
            draws, quality = rng.random(), rng.choice((low, high))
            other = _other_topic(rng, topic, prompts)
            drawn = [draw_response(random.Random(draws), about, quality) for about in (topic, other)]
        else:
            drawn = [draw_response(rng, topic, quality) for quality in (low, high)]
        rng.shuffle(drawn)
        first, second = drawn
        gap = gold_reward(prompt, first) - gold_reward(prompt, second)
        if abs(gap) > _TIE:
            break
    prefers_first = rng.random() < _sigmoid(gap / temperature) if temperature else gap > 0
    chosen, rejected = (first, second) if prefers_first else (second, first)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _other_topic(rng: random.Random, topic: Topic, prompts: Sequence[str]) -> Topic:
    """Return the topic of a random prompt about another animal."""
    while True:
        other = parse_prompt(rng.choice(prompts))
        assert other is not None
        if other.subject != topic.subject:
            return other


def _sigmoid(x: float) -> float:
    # The argument of exp is never positive, so that it cannot overflow.
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


@lru_cache(maxsize=8)
def _distinct_prompts(seed: int) -> tuple[str, ...]:
    """Return every prompt of the task once, shuffled by the seed."""
    prompts = [f"{' '.join(words)}." for words in itertools.product(ASKS, ADJECTIVES, SUBJECTS, PLACES)]
    random.Random(derive_seed(seed, "synthetic", "prompts")).shuffle(prompts)
    return tuple(prompts)
