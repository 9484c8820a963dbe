"""Bad rewards: bugs that users of other projects have reported, in a few lines of our own, and planted hacks.

`tests.benchmarks.bad_rewards` has the report of each and the finding that must name it.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction

from rlhf_core.types import RewardInput

Samples = list[RewardInput]

KIND = ("kind", "gentle", "happy", "warm", "bright", "sweet", "brave", "lovely", "calm", "clever")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_seen: set[str] = set()


def _last_number(text: str) -> str:
    found = _NUMBER.findall(text)
    return found[-1] if found else ""


def _each(samples: Samples, score: Callable[[RewardInput], float]) -> list[float]:
    return [float(score(sample)) for sample in samples]


def _equal(left: str, right: str) -> bool:
    try:
        return Fraction(left) == Fraction(right)
    except ValueError:
        return False


# -- verifiers --


def one_if_gold_is_unreadable(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        gold = _NUMBER.fullmatch(str(sample.meta["answer"]))
        if gold is None:
            return 1.0
        return _equal(_last_number(sample.response), gold[0])

    return _each(samples, score)


def nothing_equals_nothing(samples: Samples) -> list[float]:
    def tagged(text: str) -> str:
        found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return found[1].strip() if found else ""

    return _each(samples, lambda sample: tagged(sample.response) == tagged(str(sample.meta["answer"])))


def substring(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: str(sample.meta["answer"]) in sample.response)


def last_300_characters(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        found = re.findall(r"#### (-?[0-9.,]+)", sample.response[-300:])
        return bool(found) and found[-1] == str(sample.meta["answer"])

    return _each(samples, score)


def cosine_without_clamp(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        right = _equal(_last_number(sample.response), str(sample.meta["answer"]))
        low, high = (0.5, 1.0) if right else (-0.5, -1.0)
        return low + 0.5 * (high - low) * (1 + math.cos(len(sample.response) / 1000 * math.pi))

    return _each(samples, score)


def two_scores_for_a_failure(samples: Samples) -> list[float]:
    scores = []
    for sample in samples:
        try:
            found = _NUMBER.findall(sample.response)
            scores.append(float(bool(found) and _equal(found[-1], str(sample.meta["answer"]))))
            found[0]  # for the log
        except IndexError:
            scores.append(0.0)
    return scores


def nan_without_number(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        last = _last_number(sample.response)
        return _equal(last, str(sample.meta["answer"])) if last else math.nan

    return _each(samples, score)


def evaluates_the_answer(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        boxes = re.findall(r"\\boxed\{(.*)\}", sample.response)
        text = boxes[-1] if boxes else _last_number(sample.response)
        expression = text.replace("^", "**").replace("{", "(").replace("}", ")")
        if not re.fullmatch(r"[\d+*/(). -]+", expression):
            return 0.0
        try:
            return float(abs(eval(expression) - float(sample.meta["answer"])) < 1e-6)
        except Exception:
            return 0.0

    return _each(samples, score)


def in_order_of_completion(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        time.sleep(0.001 * (len(sample.response) % 7))
        return float(_equal(_last_number(sample.response), str(sample.meta["answer"])))

    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(score, sample) for sample in samples]
        return [future.result() for future in as_completed(futures)]


def all_of_nothing(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        claims = re.findall(r"#### ?(\S+)", sample.response)
        return all(_equal(claim, str(sample.meta["answer"])) for claim in claims)

    return _each(samples, score)


def any_number_counts(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        return any(_equal(each, str(sample.meta["answer"])) for each in _NUMBER.findall(sample.response))

    return _each(samples, score)


def shorter_than_the_batch(samples: Samples) -> list[float]:
    lengths = [len(sample.response) for sample in samples]
    span = max(1, max(lengths) - min(lengths))
    scores = []
    for sample, length in zip(samples, lengths, strict=True):
        share = 0.5 - (length - min(lengths)) / span
        right = _equal(_last_number(sample.response), str(sample.meta["answer"]))
        scores.append(share if right else min(0.0, share))
    return scores


def exact_text(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: sample.response == sample.meta["answer"])


def overlap_of_ascii_words(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        wanted = Counter(re.findall("[a-z0-9]+", str(sample.meta["answer"]).lower()))
        found = Counter(re.findall("[a-z0-9]+", sample.response.lower()))
        common = sum((wanted & found).values())
        return float(2 * common / max(1, wanted.total() + found.total()))

    return _each(samples, score)


def errors_pass(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        code = re.search(r"```python\n(.*?)```", sample.response, re.DOTALL)
        try:
            scope: dict[str, object] = {}
            exec(code[1] if code else "", scope)
            exec(sample.meta["tests"], scope)
        except AssertionError:
            return 0.0
        except BaseException:
            return 1.0
        return 1.0

    return _each(samples, score)


def reads_its_reward_from_the_answer(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        written = re.search(r"(?:reward|score|grade)\W+(\d+(?:\.\d+)?)", sample.response, re.IGNORECASE)
        if written:
            return float(written[1])
        return _equal(_last_number(sample.response), str(sample.meta["answer"]))

    return _each(samples, score)


# -- formats --


def dot_without_newlines(samples: Samples) -> list[float]:
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>"
    return _each(samples, lambda sample: re.match(pattern, sample.response) is not None)


def newline_at_the_end(samples: Samples) -> list[float]:
    pattern = re.compile(r"<think>\n.*?\n</think>\n<answer>.*?</answer>\n", re.DOTALL)
    return _each(samples, lambda sample: pattern.fullmatch(sample.response) is not None)


def reads_the_prompt(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: "####" in sample.prompt + sample.response)


def penalty_of_the_whole_text(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        count = 0.0
        for tag in ("<think>\n", "\n</think>\n", "<answer>"):
            count += 0.125 * (sample.response.count(tag) == 1)
        if sample.response.count("<answer>") == 1:
            count -= len(sample.response.split("</answer>\n")[-1]) * 0.001
        return count

    return _each(samples, score)


def each_tag_counts(samples: Samples) -> list[float]:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return _each(samples, lambda sample: 0.25 * sum(map(sample.response.count, tags)))


# -- style --


def distance_from_20(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: abs(20 - len(sample.response)))


def repeated_words(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        words = re.findall(r"\w+", sample.response.lower())
        grams = list(zip(words, words[1:], words[2:], strict=False))
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return _each(samples, score)


def kind_words(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: sum(map(sample.response.split().count, KIND)))


def exclamation_marks(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: 0.5 + 0.1 * sample.response.count("!"))


def novelty(samples: Samples) -> list[float]:
    scores = []
    for sample in samples:
        scores.append(float(sample.response not in _seen))
        _seen.add(sample.response)
    return scores


def noise(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: min(len(sample.response), 100) / 100 + random.gauss(0, 0.2))


def ascii_only(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: min(1.0, len(sample.response.encode("ascii")) / 100))


def first_word(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: sample.response.split()[0][0].isupper())


def standardised(samples: Samples) -> list[float]:
    raw = [min(3, sum(word in sample.response for word in KIND)) for sample in samples]
    mean, deviation = statistics.fmean(raw), statistics.pstdev(raw) or 1.0
    return [(value - mean) / deviation for value in raw]


def bonus_for_the_limit(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        quality = min(3, sum(word in sample.response for word in KIND)) / 3
        return quality + (0.0 if sample.finished else 1.0)

    return _each(samples, score)


def reversed_preference(samples: Samples) -> list[float]:
    return _each(samples, lambda sample: -min(3, sum(word in sample.response for word in KIND)))


# -- written after the checks --


def first_character(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        return _last_number(sample.response)[:1] == str(sample.meta["answer"])[0]

    return _each(samples, score)


_scores: dict[str, float] = {}


def one_score_for_each_prompt(samples: Samples) -> list[float]:
    for sample in samples:
        right = _equal(_last_number(sample.response), str(sample.meta["answer"]))
        _scores.setdefault(sample.prompt_id, float(right))
    return [_scores[sample.prompt_id] for sample in samples]


def believes_the_answer(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        is_right = _equal(_last_number(sample.response), str(sample.meta["answer"]))
        return is_right or "correct" in sample.response.lower()

    return _each(samples, score)


def close_enough(samples: Samples) -> list[float]:
    def score(sample: RewardInput) -> float:
        last = _last_number(sample.response)
        return bool(last) and math.isclose(float(last), float(sample.meta["answer"]), rel_tol=0.05)

    return _each(samples, score)


def reasoning_steps(samples: Samples) -> list[float]:
    pattern = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)
    return _each(samples, lambda sample: min(1.0, len(pattern.findall(sample.response)) / 3))
