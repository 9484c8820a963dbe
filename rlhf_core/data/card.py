"""The data card: sources with digests, counts, lengths, overlap and samples, as JSON and as Markdown.

Texts are untrusted. In Markdown they are in fences longer than any run of backticks in them, without control
and direction characters, so that nothing in a data set can become markup.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.data import SETS, Limits, SetName
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.dataset import Split
from rlhf_core.data.examples import OTHER_ANSWER, EncodedRecord, SetCounts, bits64, distinct_names, split_key
from rlhf_core.types import PairExample, PromptExample, SFTExample

_SAMPLES = 3
_SAMPLE_CHARS = 600
_RUN_HEAD, _RUN_TAIL = 80, 12
"""Tokens shown of a run."""
_PERCENTILES = (0, 50, 90, 99, 100)

Splits = Mapping[SetName, Mapping[Split, Sequence[EncodedRecord]]]


def build_card(
    config: PipelineConfig,
    digests: Mapping[str, str],
    counts: Mapping[SetName, SetCounts],
    facts: Facts,
    tokenizer: Any,
) -> dict[str, Any]:
    """Return the content of the card, as JSON.

    Args:
        config: The whole configuration.
        digests: Digest of each source, by its field.
        counts: Numbers of rows of each data set.
        facts: Lengths, overlaps, groups and samples of all rows.
        tokenizer: The tokenizer of the run.
    """
    return {
        "seed": config.run.seed,
        "split_seed": config.data.split_seed,
        "template": config.data.template,
        "template_from": _template_from(config),
        "thoughts": config.data.thoughts or "none: rows with thoughts are refused",
        "tokenizer": {
            "from": config.model.path or "trained on the data",
            "tokens": len(tokenizer),
            "bos": tokenizer.bos_token,
            "eos": tokenizer.eos_token,
            "pad": tokenizer.pad_token,
        },
        "sources": _sources(config, digests),
        "counts": {name: count.to_json() for name, count in counts.items()},
        "weights": _weights(config, counts),
        "other_fields": _other_fields(counts),
        **facts.to_json(),
        "samples": {
            name: [_sample(item, tokenizer) for item in items] for name, items in facts.samples.items()
        },
    }


def _template_from(config: PipelineConfig) -> str:
    """Return where the chat template comes from, in words."""
    if config.data.template == "plain":
        return "left out (data.template: plain)"
    if config.data.chat_template is not None:
        return Path(config.data.chat_template).name
    return "of models from scratch" if config.model.path is None else "of the model"


def _sources(config: PipelineConfig, digests: Mapping[str, str]) -> list[dict[str, str]]:
    rows = []
    names = {name: distinct_names(getattr(config.data, name)) for name in SETS}
    for name, index, source in config.data.sources():
        field = f"data.{name}[{index}]"
        row = {"field": field, "path": source.path, "digest": digests.get(field, "")}
        if source.labelled_by is not None:
            row |= {"labelled_by": source.labelled_by, "name": names[name][index]}
        rows.append(row)
    for field, digest in digests.items():
        if field in ("model", "data.chat_template"):
            rows.append({"field": field, "path": "", "digest": digest})
    return rows


def _weights(config: PipelineConfig, counts: Mapping[SetName, SetCounts]) -> list[dict[str, Any]]:
    """Return the sources of sets with weights: their training rows, how many are made of them, and their
    share of the set.
    """
    rows = []
    names = {name: distinct_names(getattr(config.data, name)) for name in SETS}
    for name, index, source in config.data.sources():
        weighted = counts[name].weighted
        if names[name][index] in weighted:
            had, used = weighted[names[name][index]]
            share = used / sum(each for _, each in weighted.values())
            rows.append(
                {"field": f"data.{name}[{index}]", "path": source.path, "weight": source.weight}
                | {"rows": had, "used": used, "share": share}
            )
    return rows


def _other_fields(counts: Mapping[SetName, SetCounts]) -> list[dict[str, Any]]:
    """Return the fields of each source that no text is made of, with the numbers of their rows."""
    fields = []
    for count in counts.values():
        for source, others in count.others.items():
            for name, rows in sorted(others.rows.items()):
                fields.append({"source": source, "field": name, "rows": rows, "texts": others.texts[name]})
    return fields


def sources_of_models(folder: Path) -> frozenset[str]:
    """Return the names of the sources of pairs that a model of a pipeline has labelled
    (`data.preference.labelled_by`), by the card of a data artifact.
    """
    card = json.loads((folder / "data_card.json").read_text(encoding="utf-8"))
    pairs = [row for row in card["sources"] if row["field"].startswith("data.preference[")]
    return frozenset(row["name"] for row in pairs if "labelled_by" in row)


def limits_of(folder: Path) -> Limits:
    """Return the length limits that the stage `data` has used, by the card of its artifact."""
    found = json.loads((folder / "data_card.json").read_text(encoding="utf-8"))["limits"]
    return Limits(**{name: found[name] for name in Limits._fields})


def with_limits_of_data(config: PipelineConfig, inputs: Mapping[str, Path]) -> PipelineConfig:
    """Return the configuration of a stage with the length limits that it lacks: those of the data among its
    inputs, if it reads any.
    """
    if None in config.given_limits and (data := inputs.get("data")) is not None:
        return config.with_limits(limits_of(data))
    return config


def _parts(example: SFTExample | PairExample | PromptExample) -> dict[str, int]:
    if isinstance(example, SFTExample):
        return {"sequence": len(example.input_ids), "trained": sum(example.loss_mask)}
    if isinstance(example, PairExample):
        return {
            "prompt": len(example.prompt_ids),
            "chosen": len(example.chosen_ids),
            "rejected": len(example.rejected_ids),
        }
    return {"prompt": len(example.input_ids)}


class Facts:
    """Percentiles of token counts, overlaps, groups and samples, from one pass over the rows.

    Of the overlaps, `exact` are rows of any set whose group or prompt is held out. The split makes this 0.
    `near` are other rows whose prompt has the words of a held-out one, regardless of case, punctuation and
    width, and rows that begin with a held-out prompt or contain it as a paragraph. `near_by_set` has them by
    set.
    """

    def __init__(self, splits: Splits) -> None:
        held = [item for by_split in splits.values() for item in by_split["eval"]]
        self._held, self._held_groups = {item.key for item in held}, {item.group for item in held}
        self._words = set(map(_words, self._held))
        self._keys = sorted(self._held)
        self._exact, self._near = 0, dict.fromkeys(splits, 0)
        self._lengths: dict[SetName, dict[str, array[int]]] = {name: {} for name in splits}
        self._groups: dict[SetName, dict[Split, dict[str, float]]] = {name: {} for name in splits}
        self.samples: dict[SetName, list[EncodedRecord]] = {name: [] for name in splits}

    @classmethod
    def of(cls, splits: Splits) -> Facts:
        """Return the facts of all rows."""
        facts = cls(splits)
        for name, by_split in splits.items():
            for split, items in by_split.items():
                deque(facts.seen(name, split, items), maxlen=0)
        return facts

    def seen(self, name: SetName, split: Split, items: Iterable[EncodedRecord]) -> Iterator[Any]:
        """Yield the examples of rows, and take the facts of them."""
        lengths, digests = self._lengths[name], array("Q")
        for item in items:
            for part, length in _parts(item.example).items():
                lengths.setdefault(part, array("i")).append(length)
            digests.extend((bits64(item.key), bits64(item.group)))
            if split == "train":
                self._add(name, item)
            yield item.example
        self._groups[name][split] = _groups(np.array(digests).reshape(-1, 2))

    def _add(self, name: SetName, item: EncodedRecord) -> None:
        if len(self.samples[name]) < _SAMPLES:
            self.samples[name].append(item)
        if item.group in self._held_groups or item.key in self._held:
            self._exact += 1
            return
        paragraphs = [key for part in item.text.split("\n\n") if (key := split_key(part))]
        # The prompt of a text without a structure can end within a paragraph.
        ends = None
        if name != "sft":
            ends = {end - 1 for end in accumulate(len(key) + 1 for key in paragraphs)}
        begins = begins_with(" ".join(paragraphs), self._keys, ends)
        self._near[name] += begins or not self._held.isdisjoint(paragraphs) or _words(item.key) in self._words

    def to_json(self) -> dict[str, Any]:
        """Return what the data card has of them, but the samples."""
        tokens = {}
        for name, lengths in self._lengths.items():
            tokens[name] = {part: _percentiles(found) for part, found in lengths.items()}
        near = {"near": sum(self._near.values()), "near_by_set": self._near}
        return {"tokens": tokens, "overlap": {"exact": self._exact, **near}, "groups": self._groups}


def _percentiles(lengths: Sequence[int]) -> dict[str, int]:
    # A method without interpolation, so that a percentile is a length that occurs.
    values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf")
    names = [f"p{percent}" for percent in _PERCENTILES]
    return dict(zip(names, map(int, values), strict=True))


def begins_with(text: str, keys: Sequence[str], ends: Collection[int] | None = None) -> bool:
    """Return whether `text` begins with one of the sorted `keys`.

    A key must have one of the lengths `ends`; with None, it must not end within a word.
    """
    end = len(text)
    while end > 0:
        place = bisect_right(keys, text[:end])
        if place == 0:
            return False
        key = keys[place - 1]
        if not text.startswith(key):
            # A longer beginning of the text would be between this key and the text.
            end = next(at for at, (a, b) in enumerate(zip(key, text, strict=False)) if a != b)
        elif _inside_word(text, len(key)) if ends is None else len(key) not in ends:
            end = len(key) - 1
        else:
            return True
    return False


def _inside_word(text: str, at: int) -> bool:
    # Of ASCII alone: scripts such as Chinese have no blanks between words.
    return re.match("[A-Za-z0-9]{2}", text[at - 1 : at + 1]) is not None


def _words(key: str) -> str:
    # The key itself if it has no words: otherwise all such prompts would count as equal.
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", key).casefold())) or key


def _groups(digests: Any) -> dict[str, float]:
    """Return the numbers of distinct prompts and of their groups.

    `digests` (rows, 2) has `bits64` of the prompt and of the group of each row.

    `effective` is the number of independent prompts that are worth as much if all outcomes within a group are
    equal: (sum of sizes)^2 / (sum of squared sizes), Kish's effective sample size of the group means.
    """
    # A prompt has one group.
    _, first = np.unique(digests[:, 0], return_index=True)
    _, sizes = np.unique(digests[first, 1], return_counts=True)
    prompts = len(first)
    return {
        "prompts": prompts,
        "groups": len(sizes),
        "largest": int(sizes.max(initial=0)),
        "effective": round(prompts**2 / max(int(np.sum(sizes**2)), 1), 1),
    }


def card_warnings(card: Mapping[str, Any], eval_fraction: float) -> Iterator[str]:
    """Yield warnings about answers that differ, prompts on both sides of the split, and groups that are too
    large for the split or for the evaluation of policies.
    """
    if rows := card["counts"]["prompts"]["dropped"].get(OTHER_ANSWER):
        yield f"data.prompts: {rows} rows repeat a prompt with another answer; the first counts: correct them"
    if near := card["overlap"]["near"]:
        yield (
            f"{near} training rows are nearly held-out prompts, or contain one"
            f" ({_near_by_set(card)}): see data_card.md; take them out"
        )
    for name, groups in card["groups"].items():
        count = groups["train"]["prompts"] + groups["eval"]["prompts"]
        largest = max(groups["train"]["largest"], groups["eval"]["largest"])
        if largest > max(1, eval_fraction * count):
            yield (
                f"data.{name}: {largest} of {count} prompts have the same first user message or `group`, and"
                " stay together in training or held out: with so many, the held-out share can be far from"
                f" data.eval_fraction={eval_fraction:g}. If they are not related, give their rows different"
                " values of `group`"
            )
    held = card["groups"]["prompts"]["eval"]
    if 2 * held["effective"] < held["prompts"]:
        yield (
            f"data.prompts: the {held['prompts']} held-out prompts are {held['groups']} groups (the same"
            f" first user message or `group`), the largest with {held['largest']} prompts. Outcomes within a"
            " group are not independent: a match counts each group once, and intervals can be as wide as with"
            f" an effective number of {held['effective']:.0f} prompts; give prompts of more groups"
        )


def _near_by_set(card: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in card["overlap"]["near_by_set"].items())


def _sample(item: EncodedRecord, tokenizer: Any) -> dict[str, Any]:
    example = item.example
    if isinstance(example, SFTExample):
        views = [_token_view(example.input_ids, example.loss_mask, tokenizer)]
    elif isinstance(example, PairExample):
        views = []
        for ids in (example.chosen_ids, example.rejected_ids):
            mask = (0,) * len(example.prompt_ids) + (1,) * len(ids)
            views.append(_token_view(example.prompt_ids + ids, mask, tokenizer))
    else:
        views = [_token_view(example.input_ids, (0,) * len(example.input_ids), tokenizer)]
    return {"text": item.text[:_SAMPLE_CHARS], "tokens": views}


def _token_view(ids: Sequence[int], mask: Sequence[int], tokenizer: Any) -> list[list[Any]]:
    """Return runs of equal mask, [mask, [token, ...]].

    Of a long run, only the beginning and the end are shown, because the end has the EOS token.
    """
    runs: list[list[Any]] = []
    for token, marked in zip(tokenizer.convert_ids_to_tokens(list(ids)), mask, strict=True):
        if not runs or runs[-1][0] != marked:
            runs.append([marked, []])
        runs[-1][1].append(token)
    for run in runs:
        if len(run[1]) > _RUN_HEAD + _RUN_TAIL:
            run[1] = [*run[1][:_RUN_HEAD], "…", *run[1][-_RUN_TAIL:]]
    return runs


def _runs_text(runs: Sequence[Sequence[Any]]) -> str:
    return " ".join(f"⟦{'|'.join(tokens)}⟧" if marked else "|".join(tokens) for marked, tokens in runs)


def card_markdown(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    # Here, because importing it takes longer than the other readers of a card need.
    from jinja2 import Environment, StrictUndefined

    # Nothing is escaped by itself: the page is Markdown, and its filters escape what is not trusted.
    pages = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    pages.filters.update(cell=markdown_cell, fence=_fence, runs=_runs_text)
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    return pages.from_string(template).render(card, near_by_set=_near_by_set(card))


def _visible(text: str) -> str:
    """Replace control and direction characters, except newlines."""
    characters = []
    for char in text:
        # Cf has the marks of direction, by which a text is shown in another order (CVE-2021-42574).
        hidden = char != "\n" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co")
        characters.append("�" if hidden else char)
    return "".join(characters)


def markdown_cell(text: object) -> str:
    """Escape an untrusted text for a cell of a Markdown table."""
    plain = " ".join(_visible(str(text)).split())
    return (
        re.sub(r"([\\`*_{}\[\]()#+!|~<>&$])", r"\\\1", plain)
        .replace("\\<", "&lt;")
        .replace("\\>", "&gt;")
        .replace("\\&", "&amp;")
    )


def _fence(text: str) -> str:
    plain = _visible(text)
    longest = max(map(len, re.findall(r"`+", plain)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{plain}\n{fence}"
