"""Creates the data artifact: token files of the three sets, tokenizer, quarantine and data card.

out/  tokenizer/  response.json  model/config.json (model from scratch only)  quarantine.jsonl  data_card.{json,md}
      {sft,pairs,prompts}_{train,eval}.parquet
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.data.card import build_card, card_markdown
from rlhf_core.data.collect import (
    SETS,
    Counts,
    Loaded,
    Quarantine,
    SetName,
    check_bad_share,
    drop_repeats,
    held_out,
    load_set,
    split_position,
)
from rlhf_core.data.dataset import Split, require_answers, require_margins, write
from rlhf_core.data.decoding import write_response_prefix
from rlhf_core.data.examples import Dropped, Made, make_example, training_texts
from rlhf_core.data.sources import (
    model_digests,
    model_state,
    require_same_state,
    require_unchanged,
    source_contents,
    template_digests,
)
from rlhf_core.data.templates import EncodeError, Encoder, read_chat_template
from rlhf_core.data.tokenizer import load_tokenizer, train_tokenizer
from rlhf_core.errors import DataError, ModelError
from rlhf_core.models.folder import base_model_config, context_problem, longest_sequence, vocabulary_problem
from rlhf_core.system.failpoints import failpoint
from rlhf_core.types import PairExample, PromptExample

log = logging.getLogger(__name__)

FILE_NAMES: dict[SetName, str] = {"sft": "sft", "preference": "pairs", "prompts": "prompts"}
_EMBEDDING_MULTIPLE = 8
_REPORT_EVERY = 200


@dataclass
class Prepared:
    """What was written, for the stage's metrics."""

    card: dict[str, Any]
    """Also in `data_card.json`."""
    made: dict[SetName, dict[Split, list[Made]]] = field(default_factory=dict)
    """Every example of every set."""


def prepare(
    config: PipelineConfig,
    out: Path,
    progress: Callable[[int, int], None],
    key_digests: Mapping[str, str] | None = None,
) -> Prepared:
    """Read, check, encode, split and write all data into `out`. `progress(done, total)` counts encoded rows.

    `key_digests` are the digests of the sources in the stage's key, or None outside of a pipeline. Raises
    DataError or ModelError with the source, the rule and a fix, also if a source does not match its digest.
    """
    contents, state = source_contents(config), model_state(config)
    digests = {name: found.digest for name, found in contents.items()} | model_digests(config)
    require_unchanged(digests, key_digests or {}, config)
    counts = {name: Counts() for name in SETS}
    quarantine = Quarantine(out / "quarantine.jsonl")
    try:
        loaded = {
            name: drop_repeats(
                load_set(config, name, quarantine, counts[name], contents),
                name,
                config.data.deduplicate,
                counts[name].dropped,
            )
            for name in SETS
        }
        failpoint("data.read")
        tokenizer, positions = _tokenizer(config, loaded)
        encoder = Encoder(tokenizer, config.data.template, config.model.path or "the trained tokenizer")
        made = _encode(config, loaded, encoder, positions, quarantine, counts, progress)
    finally:
        quarantine.close()
    if config.reward.enabled and config.reward.margin == "field":
        require_margins(
            [item.example for item in made["preference"] if isinstance(item.example, PairExample)]
        )
    prompts = [item.example for item in made["prompts"] if isinstance(item.example, PromptExample)]
    require_answers(prompts, config.ppo.rewards)
    failpoint("data.encoded")
    splits = _split(config, made, counts)
    if 0 < (count := len(splits["prompts"]["train"])) < config.ppo.prompts_per_step:
        log.warning(
            "there are %d prompts to train on, fewer than ppo.prompts_per_step=%d: each step has some of them"
            " several times",
            count,
            config.ppo.prompts_per_step,
        )
    for name in SETS:
        for split, items in splits[name].items():
            write(out, FILE_NAMES[name], split, [item.example for item in items])
    tokenizer.save_pretrained(out / "tokenizer")
    write_response_prefix(out, encoder.response_prefix)
    if config.model.path is None:
        write_tiny_config(config, tokenizer, out / "model")
    # The tokenizer and the template were read between these checks and the digests.
    require_unchanged(template_digests(config), digests, config)
    require_same_state(state, config)
    card = build_card(config, digests, counts, splits, tokenizer)
    if near := card["overlap"]["near"]:
        log.warning(
            "%d training rows are nearly held-out prompts, or contain one: see data_card.md; take them out",
            near,
        )
    (out / "data_card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    (out / "data_card.md").write_text(card_markdown(card), encoding="utf-8")
    return Prepared(card, splits)


def _tokenizer(config: PipelineConfig, loaded: dict[SetName, list[Loaded]]) -> tuple[Any, int]:
    """The tokenizer with the chat template in use, and the model's context length in tokens."""
    if config.model.path is None:
        texts = (text for items in loaded.values() for item in items for text in training_texts(item.record))
        tokenizer = train_tokenizer(texts, config.model.tiny.vocab_size)
        positions = config.model.tiny.max_positions
    else:
        tokenizer = load_tokenizer(config.model.path, config.model.revision)
        positions = _context_length(config, len(tokenizer))
    if config.data.chat_template is not None:
        try:
            tokenizer.chat_template = read_chat_template(config.data.chat_template).decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"data.chat_template: cannot read {config.data.chat_template}: {error}; give a UTF-8 Jinja"
                " file"
            ) from error
    return tokenizer, positions


def _context_length(config: PipelineConfig, vocabulary: int) -> int:
    """Return the base model's context length. Raises an InputError if tokenizer or lengths do not fit it.

    The preflight has checked a local model, but not one of the hub.
    """
    path = str(config.model.path)
    settings = base_model_config(config)
    text_settings = settings.get("text_config")
    if isinstance(text_settings, dict):  # of a multimodal model
        settings = {**settings, **text_settings}
    for problem in (
        vocabulary_problem(path, settings, vocabulary),
        context_problem(path, settings, longest_sequence(config)),
    ):
        if problem is not None:
            raise problem
    positions = settings.get("max_position_embeddings")
    return positions if isinstance(positions, int) else 2**31 - 1


def write_tiny_config(config: PipelineConfig, tokenizer: Any, folder: Path) -> None:
    """`config.json` of a Llama from scratch in the shape of `config.model.tiny`."""
    tiny = config.model.tiny
    # Written by hand because importing LlamaConfig pulls in all of modelling, many times the cost of this
    # stage.
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": -(-len(tokenizer) // _EMBEDDING_MULTIPLE) * _EMBEDDING_MULTIPLE,
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
        "tie_word_embeddings": tiny.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
        "dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _encode(
    config: PipelineConfig,
    loaded: dict[SetName, list[Loaded]],
    encoder: Encoder,
    positions: int,
    quarantine: Quarantine,
    counts: dict[SetName, Counts],
    progress: Callable[[int, int], None],
) -> dict[SetName, list[Made]]:
    made: dict[SetName, list[Made]] = {name: [] for name in SETS}
    total = sum(map(len, loaded.values()))
    done = 0
    for name in SETS:
        for item in loaded[name]:
            try:
                made[name].append(
                    make_example(
                        item, name, encoder, config.data, min(config.data.max_text_tokens, positions)
                    )
                )
            except Dropped as dropped:
                counts[name].dropped[str(dropped)] += 1
            except EncodeError as error:
                counts[name].bad += 1
                quarantine.add(f"data.{name}", item.file, item.line, str(error), item.record.prompt_text)
            done += 1
            if done % _REPORT_EVERY == 0 or done == total:
                progress(done, total)
        if quarantine.first.get(f"data.{name}"):
            check_bad_share(
                config, f"data.{name}", "all sources", counts[name].bad, counts[name].read, quarantine
            )
        _check_enough(config, name, len(made[name]), counts[name])
    return made


def _check_enough(config: PipelineConfig, name: SetName, usable: int, counts: Counts) -> None:
    if not getattr(config.data, name) or usable >= max(config.data.min_rows, 1):
        return
    reasons = [f"{number} {reason}" for reason, number in counts.dropped.most_common()]
    reasons += [f"{counts.bad} malformed (quarantine.jsonl)"] if counts.bad else []
    fields = [
        word.strip() for reason in counts.dropped for word in reason.split() if word.startswith("data.")
    ]
    fix = f"raise {' or '.join(dict.fromkeys(fields))}" if fields else "give more rows"
    raise DataError(
        f"data.{name}: {usable} of {counts.read} rows left after filtering"
        f" ({'; '.join(reasons) or 'nothing dropped'}), at least {max(config.data.min_rows, 1)} are needed"
        f" (data.min_rows); {fix}"
    )


def _split(
    config: PipelineConfig, made: dict[SetName, list[Made]], counts: dict[SetName, Counts]
) -> dict[SetName, dict[Split, list[Made]]]:
    """Move held-out prompts to `eval` in every set: at most `max_eval` rows, those with the lowest split
    positions.

    They are written in the order of their positions, so that the first n rows are a sample of all sources.
    """
    seed = config.data.split_seed
    keys: dict[str, list[str]] = {name: [item.key for item in items] for name, items in made.items() if items}
    held = held_out(seed, keys, config.data.eval_fraction)
    splits: dict[SetName, dict[Split, list[Made]]] = {}
    for name, items in made.items():
        train = [item for item in items if item.key not in held]
        evaluation = [item for item in items if item.key in held]
        evaluation.sort(key=lambda item: split_position(seed, item.key))
        if (left_out := len(evaluation) - config.data.max_eval) > 0:
            del evaluation[config.data.max_eval :]
            counts[name].dropped["held out beyond data.max_eval"] += left_out
        counts[name].train, counts[name].eval = len(train), len(evaluation)
        splits[name] = {"train": train, "eval": evaluation}
    return splits
