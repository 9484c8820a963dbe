"""Preparation of the data artifact: token files of the three sets, tokenizer, quarantine and data card.

output/  tokenizer/  response.json  model/config.json (model from scratch only)  quarantine.jsonl
         data_card.{json,md}  {sft,pairs,prompts}_{train,eval}.parquet
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.consistency import LEAST_PROMPTS
from rlhf_core.config.data import SETS, Limits, SetName, Source, fitted_limits
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.card import Facts, Splits, build_card, card_markdown, card_warnings
from rlhf_core.data.dataset import Rows, Split, picked, require_answers, require_margins, write
from rlhf_core.data.difficulty import by_difficulty
from rlhf_core.data.examples import (
    EncodedRecord,
    Quarantine,
    RecordDropped,
    SetCounts,
    SourceRecord,
    check_bad_share,
    check_rendered,
    distinct_names,
    held_out,
    read_records,
    split_position,
    stored,
    training_texts,
    why_dropped,
    with_tokens,
    within,
)
from rlhf_core.data.lengths import Lengths, measured
from rlhf_core.data.parts import FEW_ROWS, Found, encoding
from rlhf_core.data.repeats import drop_repeats, join_groups
from rlhf_core.data.sources import (
    Contents,
    model_digests,
    require_unchanged,
    source_contents,
    template_digests,
)
from rlhf_core.data.templates import EncodeError, Encoder, read_chat_template
from rlhf_core.data.tokenizer import (
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    write_response_prefix,
)
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.models.check import length_limits, length_problems, longest_sequence, vocabulary_problem
from rlhf_core.models.folder import base_model_config
from rlhf_core.models.shape import text_settings, with_defaults
from rlhf_core.system.failpoints import failpoint
from rlhf_core.system.files import write_json

log = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"
FILE_NAMES: dict[SetName, str] = {"sft": "sft", "preference": "pairs", "prompts": "prompts"}
_EMBEDDING_MULTIPLE = 8
_REPORT_EVERY = 200
_SAID_EVERY = 60.0
"""Seconds after which the log has the rate and the time left."""
FEW_STEPS = 20
"""A model from scratch or with a new template has not learned by then to end its responses."""
_FEW_PAIRS = 20
"""With fewer, the standard error of an accuracy is above 0.1."""


def prepare(
    config: PipelineConfig,
    out: Path,
    progress: Callable[[int, int], None],
    key_digests: Mapping[str, str] | None = None,
    parts: Path | None = None,
) -> dict[str, Any]:
    """Read, check, encode, split and write all data into `out`, and return the data card.

    Args:
        config: Configuration of the pipeline.
        out: An empty folder.
        progress: Called with the numbers of encoded rows and of all rows.
        key_digests: Digests of the sources in the stage's key, or None outside of a pipeline.
        parts: Folder that keeps the tokens of many rows (`rlhf_core.data.parts`), or None.

    Raises DataError or ModelError with the source, the rule and a fix, also if a source does not match its
    digest.
    """
    contents = source_contents(config)
    digests = {name: source.digest for name, source in contents.items()} | model_digests(config)
    # `read_rows` compares the files with `contents`. This compares `contents` with the key of the stage,
    # which was made before.
    require_unchanged(digests, key_digests or {}, config)
    prepared = read_and_encode(config, out, progress, contents, parts)
    failpoint("data.encoded")
    facts = Facts(prepared.splits)
    for name in SETS:
        for split, items in prepared.splits[name].items():
            write(out, FILE_NAMES[name], split, facts.seen(name, split, items))
    tokenizer = prepared.encoder.tokenizer
    save_tokenizer(tokenizer, out / "tokenizer")
    encoder = prepared.encoder
    write_response_prefix(out, encoder.response_prefix, config.data.thoughts, opened=encoder.opens_thoughts)
    if config.model.path is None:
        write_tiny_config(config, tokenizer, out / "model")
    # The template was read between this check and its digest.
    require_unchanged(template_digests(config), digests, config)
    card = prepared.card(config, digests, facts)
    for warning in (
        *size_warnings(config, prepared.splits, card),
        *card_warnings(card, config.data.eval_fraction),
    ):
        log.warning("%s", warning)
    write_json(out / "data_card.json", card)
    (out / "data_card.md").write_text(card_markdown(card), encoding="utf-8")
    return card


@dataclass(frozen=True)
class Prepared:
    """The rows of all sources, encoded and split."""

    encoder: Encoder
    lengths: Lengths
    limits: Limits
    counts: Mapping[SetName, SetCounts]
    splits: Splits

    def card(self, config: PipelineConfig, digests: Mapping[str, str], facts: Facts) -> dict[str, Any]:
        """Return the data card. `digests` are those of the sources by name, and `facts` those of the rows."""
        card = build_card(config, digests, self.counts, facts, self.encoder.tokenizer)
        given, limits = config.given_limits, self.limits
        longest_prompt = limits.prompt
        if given.prompt is None:
            # Prompts of regression sets are not measured: which ones there are must not change this artifact.
            longest_prompt = max(longest_prompt, measured(given, self.lengths.context).prompt - limits.new)
        rows = self.lengths.table(given, limits)
        card["limits"] = {**limits._asdict(), "longest_prompt": longest_prompt, "rows": rows}
        return card


def read_and_encode(
    config: PipelineConfig,
    out: Path,
    progress: Callable[[int, int], None],
    contents: Mapping[str, Contents | None],
    parts: Path | None = None,
) -> Prepared:
    """Read, check, encode and split the rows. The bad ones are written to `out/quarantine.jsonl`.

    Args:
        config: Configuration of the pipeline.
        out: An empty folder.
        progress: Called with the numbers of encoded rows and of all rows.
        contents: Expected contents of the sources by name; None: not checked.
        parts: As for `prepare`.
    """
    counts = {name: SetCounts() for name in SETS}
    quarantine = Quarantine(out / QUARANTINE)
    records: dict[SetName, Sequence[SourceRecord]] = {}
    try:
        for name in SETS:
            read = read_records(config, name, quarantine, counts[name], contents, out)
            records[name] = stored(read, out)
        # Before any row is dropped: which of two equal rows is kept depends on their order.
        for name, all_records in join_groups(records).items():
            records[name] = drop_repeats(all_records, name, config, counts[name].dropped)
        failpoint("data.read")
        tokenizer, context = _tokenizer(config, records)
        # The tokens of a prompt are then the same object in the rows of all sets, unless these are many.
        model = config.model.path or "the trained tokenizer"
        known = None if sum(map(len, records.values())) < FEW_ROWS else 1
        encoder = Encoder(tokenizer, config.data.template, model, known_prompts=known)
        if config.data.thoughts == "drop":
            encoder.require_droppable_thoughts()
        for name in SETS:
            check_rendered(f"data.{name}", records[name], encoder, config.data.max_bad_rows)
        lengths = Lengths(context)
        bounds = measured(config.given_limits, context)
        with encoding(records, encoder, bounds, parts) as (encode, again):
            report = _reporting(progress, sum(map(len, records.values())))
            sequences = {}
            for name in SETS:
                found = zip(records[name], encode(name), strict=True)
                sequences[name] = _measured(config, name, found, lengths, quarantine, counts[name], report)
        limits = _limits(config, lengths)
        kept, groups = {}, {}
        for name in SETS:
            reasons = [why_dropped(measures, limits) for measures in sequences[name][:, 2:5]]
            counts[name].dropped.update(filter(None, reasons))
            # Replaces the array with all of them, of which most columns are not needed any more.
            usable = sequences.pop(name)[[reason is None for reason in reasons]]
            _check_enough(config, name, len(usable), counts[name], lengths, limits)
            groups[name] = usable[:, 5].copy()
            kept[name] = _encoded(name, records[name], again(name), usable[:, :2].astype(np.uint32), limits)
        lengths.say(config.given_limits, limits)
    finally:
        quarantine.close()
    if config.reward.enabled and config.reward.margin == "field":
        require_margins(_examples(kept["preference"]))
    prompts = _examples(kept["prompts"])
    for warning in require_answers(prompts, config.ppo.rewards, most=config.data.max_bad_rows):
        log.warning("%s", warning)
    return Prepared(encoder, lengths, limits, counts, _split(config, kept, groups, counts))


def _examples(items: Sequence[EncodedRecord]) -> Rows[Any]:
    """Return the examples, which are all those of one set."""
    return Rows(len(items), lambda index: items[index].example)


def _tokenizer(config: PipelineConfig, records: Mapping[SetName, Sequence[SourceRecord]]) -> tuple[Any, int]:
    """Return the tokenizer with the configured chat template, and the longest sequence of the model in
    tokens.
    """
    if config.model.path is None:
        texts = (text for items in records.values() for item in items for text in training_texts(item.record))
        size = config.model.tiny.vocab_size
        tokenizer = train_tokenizer(texts, size)
        if len(tokenizer) > size:
            raise ConfigError(
                f"model.tiny.vocab_size must be at least {len(tokenizer)} with this data: special tokens,"
                f" printable ASCII and other bytes of the texts have a token each; got {size}; raise it"
            )
        positions = config.model.tiny.max_positions
    else:
        tokenizer = load_tokenizer(config.model.path, config.model.revision)
        positions = _context_length(config, base_model_config(config), len(tokenizer))
    if config.data.chat_template is not None:
        try:
            tokenizer.chat_template = read_chat_template(config.data.chat_template).decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"data.chat_template: cannot read {config.data.chat_template}: {error}; give a UTF-8 Jinja"
                " file"
            ) from error
    return tokenizer, positions


def _context_length(config: PipelineConfig, settings: Mapping[str, Any], vocabulary: int) -> int:
    """Return the tokens of the longest sequence that the base model takes. Raises an InputError if the
    tokenizer or the given limits do not fit it.

    `settings` is the content of the model's config.json. The preflight has checked that of a local model, but
    not one of the hub.
    """
    path = str(config.model.path)
    # A config.json on the hub may leave out values that are the defaults of its class.
    settings = with_defaults(settings) if is_hub_model(path) else text_settings(settings)
    attention = config.model.attention
    given = fitted_limits(config.given_limits, Limits(1, 1, 1, 1), 2**31)
    for problem in (
        vocabulary_problem(path, settings, vocabulary),
        *length_problems(path, settings, longest_sequence(given), attention),
    ):
        if problem is not None:
            raise problem
    return min(length_limits(settings, attention).values(), default=2**31)


def _limits(config: PipelineConfig, lengths: Lengths) -> Limits:
    """Return the limits that are given, and the others from the lengths of the rows."""
    limits = fitted_limits(config.given_limits, lengths.needed(config.given_limits), lengths.context)
    overlong = config.ppo.overlong
    if overlong is not None and overlong.buffer > limits.new:
        raise ConfigError(
            f"ppo.overlong.buffer must be at most ppo.max_new_tokens ({limits.new}, from the data); got"
            f" {overlong.buffer}; lower it, or set ppo.max_new_tokens"
        )
    shown = {row["field"]: row["tokens"] for row in lengths.table(config.given_limits, limits)}
    log.info("limits in tokens: %s", ", ".join(f"{name} {value}" for name, value in shown.items()))
    return limits


def write_tiny_config(config: PipelineConfig, tokenizer: Any, folder: Path) -> None:
    """Write the `config.json` of a Llama from scratch in the shape of `config.model.tiny`."""
    tiny = config.model.tiny
    # Not by LlamaConfig, because importing it takes many times as long as this whole stage.
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": math.ceil(len(tokenizer) / _EMBEDDING_MULTIPLE) * _EMBEDDING_MULTIPLE,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads,
        "head_dim": tiny.hidden_size // tiny.heads,
        "hidden_act": "silu",
        "max_position_embeddings": tiny.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
        "dtype": "float32",
    }
    folder.mkdir()
    write_json(folder / "config.json", settings)


def _measured(
    config: PipelineConfig,
    name: SetName,
    rows: Iterable[tuple[SourceRecord, Found]],
    lengths: Lengths,
    quarantine: Quarantine,
    counts: SetCounts,
    report: Callable[[], None],
) -> Any:
    """Return the sequences of a set, and add their lengths to `lengths`. No limit is applied.

    An array of doubles (sequences, 6): the index of the record, the number in the record, its
    `measures`, and the position of the group. Numbers only, because there can be many.

    Args:
        config: The configuration.
        name: The set.
        rows: Its records, and what is found for each.
        lengths: Those of all sets.
        quarantine: Receives the bad rows.
        counts: Those of the set.
        report: Called for each row.
    """
    sequences = array("d")
    for row, (item, found) in enumerate(rows):
        if isinstance(found, RecordDropped):
            counts.dropped[str(found)] += 1
            lengths.add(name, found.lengths)
        elif isinstance(found, EncodeError):
            counts.bad += 1
            quarantine.add(f"data.{name}", item.file, item.line, str(found), item.record.prompt_text)
        else:
            counts.further += len(found) - 1
            group = split_position(config.data.split_seed, item.group)
            for number, tokens in enumerate(found):
                lengths.add(name, tokens.lengths)
                if tokens.longest_turn is not None:
                    lengths.turns.append(tokens.longest_turn)
                sequences.extend((row, number, *tokens.measures, group))
        report()
    # Only rows that failed here have this name. `read_records` has checked the bad rows of each source.
    if quarantine.first.get(f"data.{name}"):
        check_bad_share(config, f"data.{name}", "all sources", counts.bad, counts.read, quarantine)
    return np.frombuffer(sequences).reshape(-1, 6)


def _encoded(
    name: SetName,
    records: Sequence[SourceRecord],
    found: Sequence[Found],
    sequences: Any,
    limits: Limits,
) -> Rows[EncodedRecord]:
    """Return the sequences of a set with their tokens and texts. `sequences` (sequences, 2) has the index of
    the record and the number in the record.
    """

    def item(index: int) -> EncodedRecord:
        row, number = map(int, sequences[index, :2])
        of_row = found[row]
        assert isinstance(of_row, list)
        return with_tokens(records[row], name, within(of_row[number], limits))

    return Rows(len(sequences), item)


def _reporting(progress: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """Return a function that is called for each encoded row. It logs the rate and the time left as well."""
    done, said, said_at = 0, 0, time.monotonic()

    def report() -> None:
        nonlocal done, said, said_at
        done += 1
        if done % _REPORT_EVERY and done != total:
            return
        progress(done, total)
        now = time.monotonic()
        if now - said_at >= _SAID_EVERY:
            rate = (done - said) / (now - said_at)
            minutes = (total - done) / rate / 60
            log.info("%d of %d rows encoded, %.0f a second, %.0f minutes left", done, total, rate, minutes)
            said, said_at = done, now

    return report


def _check_enough(
    config: PipelineConfig, name: SetName, usable: int, counts: SetCounts, lengths: Lengths, limits: Limits
) -> None:
    """Raise DataError if too few rows of a set are left."""
    needed = max(config.data.min_rows, 2)  # one for training, one held out
    if not getattr(config.data, name) or usable >= needed:
        return
    # The reasons of rows that a limit dropped have the name of its field.
    words = dict.fromkeys(" ".join(counts.dropped).split())
    fields = [word for word in words if word.startswith("data.")]
    fixes = [f"{field}: {lengths.why(field, [name], config.given_limits, limits)}" for field in fields]
    reasons = [f"{number} {reason}" for reason, number in counts.dropped.most_common()]
    if counts.bad:
        reasons.append(f"{counts.bad} malformed (quarantine.jsonl)")
    fix = "; ".join(fixes) or "give more rows"
    raise DataError(
        f"data.{name}: {usable} of {counts.read} rows left after filtering"
        f" ({'; '.join(reasons) or 'nothing dropped'}), at least {needed} are needed (data.min_rows); {fix}"
    )


def size_warnings(config: PipelineConfig, splits: Splits, card: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings of too few steps of SFT, of too few prompts for the steps of PPO, for a champion, or to
    choose and judge the policy, and of too few pairs to measure the reward model. `splits` have all rows, and
    `card` is theirs.

    Raises DataError if `ppo.difficulty` leaves no prompt.
    """
    demonstrations, sft = len(splits["sft"]["train"]), config.sft
    steps = math.ceil(demonstrations / sft.batch_size) * sft.epochs
    if sft.enabled and 0 < steps < FEW_STEPS:
        epochs = math.ceil(FEW_STEPS * sft.epochs / steps)
        yield (
            f"sft.epochs: {demonstrations} demonstrations are only {steps} steps of SFT (sft.batch_size="
            f"{sft.batch_size}), after which responses may not end; sft.epochs={epochs} gives"
            f" {steps // sft.epochs * epochs}"
        )
    count = card["groups"]["prompts"]["train"]["prompts"]  # a weight makes copies
    trained = count
    if config.ppo.enabled and config.ppo.difficulty is not None:
        # The stage `ppo`, which chooses them, comes after hours of other training.
        chosen = by_difficulty(_examples(splits["prompts"]["train"]), config.ppo.difficulty)
        trained = len({prompt.prompt_id for prompt in chosen})
    if config.ppo.enabled and 0 < trained < config.ppo.prompts_per_step:
        yield (
            f"there are {trained} prompts to train on, fewer than ppo.prompts_per_step="
            f"{config.ppo.prompts_per_step}: each step has some of them several times"
        )
    held_out_prompts = len(splits["prompts"]["eval"])
    if not config.generates_prompts:
        yield from _too_few_held_out(config, held_out_prompts, count + held_out_prompts)
    held_out_pairs = len(splits["preference"]["eval"])
    if config.reward.enabled and held_out_pairs < _FEW_PAIRS:
        yield (
            f"data.preference: {held_out_pairs} pairs are held out (data.eval_fraction): the accuracy of the"
            " reward model, which reward.min_accuracy limits, will be uncertain; give more pairs, or raise"
            " the fraction"
        )


def _enough(config: PipelineConfig, held_out: int, total: int) -> str:
    """Return the setting with which so many of all prompts, and hardly ever fewer, are held out."""
    # The split is random: two standard deviations more than the mean.
    fraction = math.ceil(100 * (held_out + 2 * math.sqrt(held_out)) / total) / 100
    if fraction > 0.5:
        return "give more prompts"
    settings = f"data.eval_fraction={max(fraction, config.data.eval_fraction):g}"
    if held_out > config.data.max_eval:
        settings += f" with data.max_eval={held_out}"
    return f"{settings} is enough"


def _too_few_held_out(config: PipelineConfig, count: int, total: int) -> Iterator[str]:
    """Warn if too few prompts are held out for a champion, or to choose the policy with others than those
    that judge it.

    Args:
        config: The configuration.
        count: Number of held-out prompts.
        total: Number of all prompts.
    """
    ppo, prompts, least = config.ppo, config.evaluate.prompts, config.register_.min_prompts
    most = min(config.data.max_eval, count)
    # `evaluate.prompts` and `data.max_eval` below the least are warnings before the run.
    if count < least <= min(prompts, config.data.max_eval):
        yield (
            f"data.prompts: {count} prompts are held out (data.eval_fraction), fewer than"
            f" register.min_prompts ({least}): no candidate can become champion;"
            f" {_enough(config, least, total)}, or lower register.min_prompts"
        )
    if not config.evaluations_choose:
        return
    wanted, needed = prompts + ppo.evaluate_prompts, least + ppo.evaluate_prompts
    shared = min(prompts, most) + min(ppo.evaluate_prompts, most) - most
    others = most - ppo.evaluate_prompts
    if others < min(LEAST_PROMPTS, prompts):
        yield (
            f"ppo.evaluate_prompts: {most} prompts are held out (data.max_eval, data.eval_fraction), so"
            f" at least {shared} of them both choose the policy and judge it, and results of evaluation"
            f" and match are slightly too high; {wanted} held-out prompts are enough:"
            f" {_enough(config, wanted, total)}"
        )
    elif others < least <= min(prompts, most):
        yield (
            f"ppo.evaluate_prompts: {ppo.evaluate_prompts} of {most} held-out prompts choose the policy, so"
            f" {others} judge it, fewer than register.min_prompts ({least}): no candidate can become"
            f" champion; hold out {needed} ({_enough(config, needed, total)}), or lower"
            " register.min_prompts"
        )


def _split(
    config: PipelineConfig,
    encoded: Mapping[SetName, Sequence[EncodedRecord]],
    positions: Mapping[SetName, Any],
    counts: Mapping[SetName, SetCounts],
) -> dict[SetName, dict[Split, Sequence[EncodedRecord]]]:
    """Move held-out groups to `eval` in every set: at most `max_eval` rows with the lowest split positions.

    They are written in the order of the positions of their groups and, within a group, of their prompts, so
    that the first n rows are a sample of all sources.
    """
    some = {name: each for name, each in positions.items() if len(each)}
    held = list(held_out(some, config.data.eval_fraction))
    most = config.data.max_eval
    splits: dict[SetName, dict[Split, Sequence[EncodedRecord]]] = {}
    for name, items in encoded.items():
        groups = positions[name]
        is_held = np.isin(groups, held)
        evaluation = np.flatnonzero(is_held)
        if (excess := len(evaluation) - most) > 0:
            counts[name].dropped["held out beyond data.max_eval"] += excess
            evaluation = evaluation[groups[evaluation] <= np.partition(groups[evaluation], most)[most]]
        # Read in the order in which they are kept.
        chosen = [(groups[at], items[at]) for at in evaluation]
        chosen.sort(key=lambda one: (one[0], split_position(config.data.split_seed, one[1].key)))
        evaluated = [item for _, item in chosen[:most]]
        # Not the held-out rows: their copies would count as independent outcomes in each evaluation.
        train = _weighted(config, name, picked(items, np.flatnonzero(~is_held)), counts[name])
        counts[name].train, counts[name].eval = len(train), len(evaluated)
        splits[name] = {"train": train, "eval": evaluated}
    return splits


def _weighted(
    config: PipelineConfig, name: SetName, train: Sequence[EncodedRecord], counts: SetCounts
) -> Sequence[EncodedRecord]:
    """Return the training rows as often as the weights of their sources say: all rows of a source a whole
    number of times, and for the rest a sample by the hashes of their texts. The copies follow all rows.
    """
    sources: tuple[Source, ...] = getattr(config.data, name)
    if all(source.weight == 1.0 for source in sources):
        return train
    names = distinct_names(sources)
    origins, positions = array("i"), array("d")
    for item in train:
        origins.append(names.index(item.example.source))
        positions.append(split_position(config.data.split_seed, f"weight\x1f{item.text}"))
    turns = np.zeros(len(train), np.int64)
    for index, source in enumerate(sources):
        rows = np.flatnonzero(np.array(origins) == index)
        if not len(rows):
            continue
        # At least one: a small source with a small weight would otherwise be left out without a word.
        used = max(1, round(source.weight * len(rows)))
        whole, rest = divmod(used, len(rows))
        turns[rows] = whole
        turns[rows[np.argsort(np.array(positions)[rows], kind="stable")[:rest]]] += 1
        counts.weighted[names[index]] = (len(rows), used)
    copies = [np.flatnonzero(turns > turn) for turn in range(turns.max())]
    return picked(train, np.concatenate(copies))
