"""What the rows of large data share: groups and repeats. Few of the rows are in memory.

rows -> `join_groups` -> `drop_repeats`
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import Any

from rlhf_core.config.data import SetName
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.answers import gold_answers, same_answer
from rlhf_core.data.dataset import Rows, picked
from rlhf_core.data.examples import NAMED, OTHER_ANSWER, SourceRecord, bits64, split_key, until_first_question
from rlhf_core.data.formats import Record, field_value

# -- groups --


def join_groups(
    records: Mapping[SetName, Sequence[SourceRecord]],
) -> dict[SetName, Sequence[SourceRecord]]:
    """Return the records with the keys of joined groups, which do not depend on the order of rows and sets.

    Two groups are joined if they have rows with the same prompt, as text. A row that names no group joins
    all groups with its first user message, and those whose prompt is its opening, which is this message and
    the system message before it. The key is the smallest one that rows name, else the smallest first user
    message.
    """
    pairs = _joined_groups(records)
    if not len(pairs):
        return dict(records)
    key = _joined_keys(pairs, records)
    return {name: _with_keys(items, key) for name, items in records.items()}


def _joined_groups(records: Mapping[SetName, Sequence[SourceRecord]]) -> Any:
    """Return pairs of groups that are joined, as their digests (pairs, 2)."""
    import numpy as np

    # Digests, because the texts of many rows do not fit into memory.
    texts, groups, named, asked, questions = (array("Q") for _ in range(5))
    for item in chain.from_iterable(records.values()):
        opening = until_first_question(item.record)
        group = bits64(item.group)
        said = {item.record.prompt_text}
        if item.group.startswith(NAMED):
            question = split_key(opening[-1])
            named.append(group)
            asked.append(bits64(question))
        else:
            question = item.group
            questions.append(group)
            said.add("\n\n".join(opening))
        for text in said:
            key = question if text == opening[-1] else split_key(text)
            texts.append(bits64(key))
            groups.append(group)
    order = np.lexsort((groups, texts))
    text, group = np.array(texts)[order], np.array(groups)[order]
    is_shared = (text[1:] == text[:-1]) & (group[1:] != group[:-1])
    shared = np.stack([group[:-1], group[1:]], axis=1)[is_shared]
    return np.concatenate([shared, np.stack([named, asked], axis=1)[np.isin(asked, questions)]])


def _joined_keys(pairs: Any, records: Mapping[SetName, Sequence[SourceRecord]]) -> Callable[[str], str]:
    """Return a function that returns the key which replaces that of a group."""
    import numpy as np

    groups, places = np.unique(pairs, return_inverse=True)
    digests, parents = array("Q", groups.tobytes()), array("q", range(len(groups)))

    def root(place: int) -> int:
        while (parent := parents[place]) != place:
            parents[place] = parents[parent]
            place = parent
        return place

    for one, other in places.reshape(-1, 2):
        parents[root(one)] = root(other)
    keys: dict[int | None, str] = {}

    def joined(group: str) -> int | None:
        digest = bits64(group)
        place = bisect_left(digests, digest)
        return root(place) if place < len(digests) and digests[place] == digest else None

    for item in chain.from_iterable(records.values()):
        if (place := joined(item.group)) is not None:
            # The smallest one: which place is the root depends on the order in which they were joined, and
            # the key decides on which side of the split they are.
            keys[place] = min(item.group, keys.get(place, item.group))
    return lambda group: keys.get(joined(group), group)


def _with_keys(items: Sequence[SourceRecord], key: Callable[[str], str]) -> Rows[SourceRecord]:
    def item(index: int) -> SourceRecord:
        found = items[index]
        return found._replace(group=key(found.group))

    return Rows(len(items), item)


# -- repeats --


def drop_repeats(
    records: Sequence[SourceRecord], name: SetName, config: PipelineConfig, dropped: Counter[str]
) -> Rows[SourceRecord]:
    """Return the distinct records in their order. Of pairs with both orders of preference, none is kept. Of
    equal prompts, the first one is kept, also if `ppo.rewards` compare with the answers of the rows and these
    differ.

    `dropped` counts the others by reason.
    """
    import numpy as np

    contents, unordered = array("Q"), array("Q")
    for item in records:
        contents.append(bits64(_content(item.record, name)))
        unordered.append(bits64(_unordered(item.record)) if name == "preference" else contents[-1])
    keys, either = np.array(contents), np.array(unordered)
    _, places, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first = places[inverse]
    is_repeated = (first < np.arange(len(keys))) & config.data.deduplicate
    is_contradictory = np.isin(either, np.intersect1d(either[either == keys], either[either != keys]))
    is_dropped = is_repeated | is_contradictory
    for at in np.flatnonzero(is_dropped).tolist():
        if is_contradictory[at]:
            dropped["contradictory pair"] += 1
        else:
            is_same = name != "prompts" or _same_answers(records[at], records[first[at]], config)
            dropped["duplicate" if is_same else OTHER_ANSWER] += 1
    return picked(records, np.flatnonzero(~is_dropped))


def _same_answers(first: SourceRecord, second: SourceRecord, config: PipelineConfig) -> bool:
    for name in config.ppo.answer_fields:
        value, other = field_value(first.record.meta, name), field_value(second.record.meta, name)
        spellings = product(gold_answers(value), gold_answers(other))
        if value != other and not any(same_answer(*pair) for pair in spellings):
            return False
    return True


def _content(record: Record, name: SetName) -> str:
    """Return a text that is the same for equal rows only."""
    if name == "prompts":
        return record.prompt_text
    # Of a pair, `sft` uses the chosen response only.
    rejected = None if name == "sft" else record.rejected
    return json.dumps(
        (record.text, record.messages or record.prompt, record.tools, record.response, rejected)
    )


def _unordered(record: Record) -> str:
    """Return the content of a pair that does not depend on which of the two responses is preferred."""
    assert record.response is not None and record.rejected is not None
    response, rejected = sorted((record.response, record.rejected))
    return _content(record._replace(response=response, rejected=rejected), "preference")
