"""Drift: how far the data of a run are from those of the champion.

    folder of a data artifact -> `statistics` -> `compare` -> a `Drift` for each measure

The rows that the champion's data do not have are also compared alone (`statistics_of_new_rows`,
`compare_new_rows`): among many old rows, a few rows of another kind hardly change a distribution.

Texts are decoded, so that data with different tokenizers can be compared. Distributions are compared by the
Jensen-Shannon divergence (Lin 1991), which is 0 for equal and 1 for disjoint ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.data import Measure
from rlhf_core.data.dataset import evenly, load_pairs, read_evenly
from rlhf_core.data.tokenizer import load_decoder
from rlhf_core.data.words import WITHOUT_BLANKS
from rlhf_core.evaluation.statistics import difference_of_shares, group_of
from rlhf_core.executors.spec import config_from_json
from rlhf_core.logs import log_to_stderr
from rlhf_core.system.files import write_json
from rlhf_core.types import PairExample

SAMPLED_ROWS = 10_000
"""Texts of at most this number of training rows of each set are compared."""
# From this number on the correction for chance in `divergence` is good enough (decision 48).
MIN_NEW_ROWS = 100
"""Fewer new rows of a set are not compared alone."""
# With samples of equal distributions, the largest divergence for this number was 0.006 (decision 48).
_WORDS = 1000
"""The most frequent words of both data sets. All others are one category."""
_MIN_COUNT = 10
"""Rarer words are among the others: the correction for chance is too small for them."""
_OTHER_WORDS = "(other words)"
_SHOWN_CHANGES = 5
# Without the first part, a sentence of Chinese, Japanese or Thai would be one word, which no other row has.
_WORD = re.compile(rf"[{WITHOUT_BLANKS}]|[^\W{WITHOUT_BLANKS}]+")

_TEXTS: dict[str, tuple[str, dict[str, str]]] = {
    "sft": ("sft", {"input_ids": "sft"}),
    "preference": (
        "pairs",
        {
            "prompt": "preference.prompt",
            "chosen_ids": "preference.chosen",
            "rejected_ids": "preference.rejected",
        },
    ),
    "prompts": ("prompts", {"prompt": "prompts"}),
}
"""File and columns of the texts of each set, with the place of each column."""

Counts = Mapping[str, Counter[str]]
"""Numbers of categories, by place: a set such as `sft`, or a text of its rows such as `preference.chosen`."""


@dataclass
class DataStatistics:
    """What is compared of one data artifact."""

    lengths: dict[str, Counter[str]] = field(default_factory=dict)
    """Texts by their length in characters. Each range ends at the square root of 2 times its beginning."""
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    """Rows by the name of their source."""
    vocabulary: dict[str, Counter[str]] = field(default_factory=dict)
    """Words without regard to case."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each set."""


@dataclass(frozen=True)
class Change:
    """A category with its share in the champion's and in the new data."""

    category: str
    before: float
    after: float


@dataclass(frozen=True)
class Drift:
    """One measure of the difference."""

    measure: Measure
    """Its field in `drift.warn` and `drift.stop`."""
    value: float | None
    """The largest one of all places; None if it was not measured."""
    place: str = ""
    """Part of the data with the largest value."""
    low: float | None = None
    high: float | None = None
    """Confidence interval of a value that is measured on few rows; None for the others."""
    changes: tuple[Change, ...] = ()
    """The categories that contribute most there."""
    note: str = ""
    """Why it was not measured."""
    new_rows: int | None = None
    """Number of rows, if the value is that of the rows that the champion's data do not have; None for the
    value of all rows.
    """

    @property
    def label(self) -> str:
        """The measure, as messages and the page name it."""
        if self.new_rows is None:
            return self.measure
        return f"{self.measure} of new rows"

    @property
    def metric(self) -> str:
        """Name of the metric."""
        if self.new_rows is None:
            return f"drift/{self.measure}"
        return f"drift/new_rows/{self.measure}"


def statistics(folder: Path) -> DataStatistics:
    """Return the statistics of the data artifact in a folder. Raises DataError if a file cannot be read."""
    found = DataStatistics()
    decode = load_decoder(folder)
    for name, (file, columns) in _TEXTS.items():
        for row in read_evenly(folder, file, "train", tuple(columns), SAMPLED_ROWS):
            _count_texts(found, name, _texts(row, decode))
        # All rows and no sample: the names are short, and a small source must not be missing by chance.
        rows = read_evenly(folder, file, "train", ("source",), None)
        found.sources[name] = Counter(row[0] or "(unknown)" for row in rows)
        found.rows[name] = len(rows)
    return found


def statistics_of_new_rows(champion: Path, folder: Path) -> DataStatistics:
    """Return the statistics of the training rows in `folder` whose texts are in no row of the champion's
    data.

    Sources are not included: new rows often come from one source. A set with fewer than
    `MIN_NEW_ROWS` new rows has none, and so has a set without old rows, whose new rows are all rows.

    Args:
        champion: Folder of the champion's data artifact.
        folder: Folder of the new one.

    Raises:
        DataError: A file cannot be read.
    """
    found = DataStatistics()
    decode, decode_old = load_decoder(folder), load_decoder(champion)
    tokenizers = [(data / "tokenizer" / "tokenizer.json").read_bytes() for data in (champion, folder)]
    same_tokenizer = tokenizers[0] == tokenizers[1]

    def digest(row: Sequence[Any], decode: Callable[[Sequence[int]], str]) -> bytes:
        # With one tokenizer, equal tokens are equal texts, and nothing has to be decoded.
        return _digest(row if same_tokenizer else _texts(row, decode))

    for name, (file, columns) in _TEXTS.items():
        known: set[bytes] = set()
        # A row that the champion held out is not new either.
        for split in ("train", "eval"):
            rows = read_evenly(champion, file, split, tuple(columns), None)
            known.update(digest(row, decode_old) for row in rows)
        rows = read_evenly(folder, file, "train", tuple(columns), None)
        new = [row for row in rows if digest(row, decode) not in known]
        if MIN_NEW_ROWS <= len(new) < len(rows):
            found.rows[name] = len(new)
            for row in evenly(new, SAMPLED_ROWS):
                _count_texts(found, name, _texts(row, decode))
    return found


def _texts(row: Sequence[Any], decode: Callable[[Sequence[int]], str]) -> list[str]:
    return [value if isinstance(value, str) else decode(value) for value in row]


def _digest(row: Sequence[Any]) -> bytes:
    """Return a digest of texts or token ids."""
    # Texts of models can have surrogates, which UTF-8 cannot encode.
    text = json.dumps(list(row))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _count_texts(found: DataStatistics, name: str, texts: Sequence[str]) -> None:
    for place, text in zip(_TEXTS[name][1].values(), texts, strict=True):
        found.lengths.setdefault(place, Counter())[_length_range(len(text))] += 1
        found.vocabulary.setdefault(place, Counter()).update(_WORD.findall(text.casefold()))


def _length_range(length: int) -> str:
    if length == 0:
        return "0"
    step = math.floor(2 * math.log2(length))
    return f"{math.ceil(2 ** (step / 2))}-{math.ceil(2 ** ((step + 1) / 2)) - 1}"


def compare(before: DataStatistics, after: DataStatistics) -> list[Drift]:
    """Return the drift of each measure from the champion's data to the new data."""
    return [
        _largest("lengths", before.lengths, after.lengths),
        _largest("sources", before.sources, after.sources),
        _largest("vocabulary", *_most_frequent(before.vocabulary, after.vocabulary)),
    ]


def compare_new_rows(before: DataStatistics, new: DataStatistics) -> list[Drift]:
    """Return the drift from the champion's data to the new rows alone, of the measures that it has there.

    `new` is the result of `statistics_of_new_rows`.
    """
    found = [each for each in compare(before, new) if each.value is not None]
    return [replace(each, new_rows=new.rows[each.place.split(".")[0]]) for each in found]


def _largest(measure: Measure, before: Counts, after: Counts) -> Drift:
    largest = Drift(measure, None, note="no set has rows in both")
    for place in before:
        old, new = before[place], after.get(place, Counter())
        if not old or not new:
            continue
        value = divergence(old, new)
        if largest.value is None or value > largest.value:
            largest = Drift(measure, value, place, changes=_changes(old, new))
    return largest


def divergence(before: Counter[str], after: Counter[str]) -> float:
    """Return the Jensen-Shannon divergence of two non-empty samples in bits, corrected for their sizes.

        JSD(P, Q) = H((P + Q) / 2) - (H(P) + H(Q)) / 2

    Two samples of n and m draws from the same distribution over k categories have a divergence of about
    (k - 1) (1/n + 1/m) / (8 ln 2), by its second-order expansion. This is subtracted; the result is at least
    0.
    """
    n, m = before.total(), after.total()
    names = before.keys() | after.keys()
    terms = []
    for name in names:
        p, q = before[name] / n, after[name] / m
        mean = (p + q) / 2
        terms += [share * math.log2(share / mean) for share in (p, q) if share > 0]
    chance = (len(names) - 1) * (1 / n + 1 / m) / (8 * math.log(2))
    # The order of a set of texts differs between processes. The sum by fsum does not depend on it.
    return max(0.0, math.fsum(terms) / 2 - chance)


def _changes(before: Counter[str], after: Counter[str]) -> tuple[Change, ...]:
    """Return the categories whose shares differ most."""
    n, m = before.total(), after.total()
    changes = [Change(name, before[name] / n, after[name] / m) for name in before.keys() | after.keys()]
    changes.sort(key=lambda change: (-abs(change.after - change.before), change.category))
    return tuple(changes[:_SHOWN_CHANGES])


def _most_frequent(before: Counts, after: Counts) -> tuple[Counts, Counts]:
    """Return the counts with the most frequent words of both, by their mean share, and one category of
    others.
    """
    kept_before: dict[str, Counter[str]] = {}
    kept_after: dict[str, Counter[str]] = {}
    for place in before:
        old, new = before[place], after.get(place, Counter())
        if not old or not new:
            continue
        n, m = old.total(), new.total()
        words = [word for word in old.keys() | new.keys() if old[word] + new[word] >= _MIN_COUNT]
        # Equal shares are ordered by the word, because the order of a set of texts differs between processes.
        words.sort(key=lambda word: (-old[word] / n - new[word] / m, word))
        kept = set(words[:_WORDS])
        kept_before[place] = _only(old, kept)
        kept_after[place] = _only(new, kept)
    return kept_before, kept_after


def _only(counts: Counter[str], kept: set[str]) -> Counter[str]:
    found = Counter({word: count for word, count in counts.items() if word in kept})
    others = counts.total() - found.total()
    if others:
        found[_OTHER_WORDS] = others
    return found


def to_json(drifts: Sequence[Drift]) -> list[dict[str, Any]]:
    """Return plain dicts. `from_json` is the inverse."""
    return list(map(asdict, drifts))


def from_json(rows: Sequence[Mapping[str, Any]]) -> list[Drift]:
    """Return the records that `to_json` has written."""
    drifts = []
    for row in rows:
        changes = tuple(Change(**each) for each in row["changes"])
        drifts.append(Drift(**{**row, "changes": changes}))
    return drifts


# -- the process that measures: `python -m rlhf_core.ops.drift_measures REQUEST.json` --
#
# It holds both data sets in memory, and the champion's reward model.


@dataclass(frozen=True)
class DriftRequest:
    """What is compared."""

    config: dict[str, Any]
    """Configuration of the run, as JSON."""
    champion: str
    """Name of the version."""
    champion_data: str
    """Folder of its data artifact."""
    data: str
    """Folder of the new data artifact."""
    reward_model: str | None
    """Folder of the champion's reward model; None if it is not used."""
    accuracy: float
    """Its accuracy on its own held-out pairs."""
    note: str
    """Why it is not used."""
    result: str
    """File that gets the measures."""

    def write(self, path: Path) -> None:
        """Write the file that `read` reads."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> DriftRequest:
        """Return the request in `path`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def main(path: Path) -> None:
    """Measure what the request in `path` asks for."""
    request = DriftRequest.read(path)
    config = config_from_json(request.config)
    data = Path(request.data)
    champion = Path(request.champion_data)
    # Of both data artifacts only files are read, so that champions of earlier releases can be compared.
    before = statistics(champion)
    drifts = [*compare(before, statistics(data)), *agreement(config, request)]
    drifts += compare_new_rows(before, statistics_of_new_rows(champion, data))
    write_json(Path(request.result), {"champion": request.champion, "measures": to_json(drifts)})


def agreement(config: PipelineConfig, request: DriftRequest) -> list[Drift]:
    """Return how much less the champion's reward model agrees with the labels of the held-out pairs: of all,
    and of those that are not in the champion's data, if these are a part of them.

    The interval, at the level `evaluate.confidence`, is that of a difference of two shares of independent
    samples (Newcombe 1998, method 10). Pairs of the same prompt or group count as one trial.
    """
    if request.reward_model is None:
        return [Drift("agreement", None, note=request.note)]
    data = Path(request.data)
    pairs = load_pairs(data, "eval")
    if not pairs:
        return [Drift("agreement", None, note="there are no held-out pairs")]
    # Only here, because the other measures need no torch.
    from rlhf_core.engines.distributed import resolve_device
    from rlhf_core.stages.reward import evaluate_saved
    from rlhf_core.stages.training import is_correct

    device = resolve_device(config.run.device)
    _, scores_P2 = evaluate_saved(config, Path(request.reward_model), pairs, load_decoder(data).pad, device)
    correct = is_correct(scores_P2[:, 0] - scores_P2[:, 1]).tolist()
    champion = Path(request.champion_data)
    own = load_pairs(champion, "eval")
    # The tokenizer and the template are the same.
    known = set(map(_tokens, (*own, *load_pairs(champion, "train"))))
    new = [index for index, pair in enumerate(pairs) if _tokens(pair) not in known]
    trials = len(set(map(group_of, own)))

    def loss_on(indices: Sequence[int], new_rows: int | None = None) -> Drift:
        values = [correct[index] for index in indices]
        before, after = request.accuracy, sum(values) / len(values)
        of_new = len({group_of(pairs[index]) for index in indices})
        loss = difference_of_shares(before, trials, after, of_new, config.evaluate.confidence)
        category = "pairs with the higher score for the chosen response"
        place = f"{len(values)} held-out pairs, {len(own)} of the champion"
        change = Change(category, before, after)
        # A gain is no drift.
        return Drift(
            "agreement", max(0.0, loss.mean), place, loss.low, loss.high, (change,), new_rows=new_rows
        )

    losses = [loss_on(range(len(pairs)))]
    # If all pairs are new, this would be the same number again.
    if 0 < len(new) < len(correct):
        losses.append(loss_on(new, len(new)))
    return losses


def _tokens(pair: PairExample) -> tuple[tuple[int, ...], ...]:
    return pair.prompt_ids, pair.chosen_ids, pair.rejected_ids


if __name__ == "__main__":
    log_to_stderr()
    main(Path(sys.argv[1]))
