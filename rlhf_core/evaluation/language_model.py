"""A language model as judge: `evaluate.language_model`.

    held-out pairs  ->  agreement with people  -- below the limit -->  the stage fails
    answers of two policies  ->  questions in both orders  ->  replies kept before?  ->  model  ->  win rate

The model is at an address (`rewards.chat_service`), or in a folder, where the engines of the
evaluation run it (`evaluate.engines`). There it may only generate the tokens of the letters A, B and C, so
that every reply is a verdict.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import result_settings
from rlhf_core.data.card import sources_of_models
from rlhf_core.data.dataset import load_pairs, load_prompts
from rlhf_core.data.messages import Message
from rlhf_core.data.sources import model_digest
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.data.tokenizer import load_decoder, load_tokenizer
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.evaluation.generate import needs_engine_actors, on_engines, running_engine
from rlhf_core.evaluation.statistics import Comparison, Verdicts, group_of
from rlhf_core.evaluation.summary import Intervals
from rlhf_core.models.folder import ModelFolder
from rlhf_core.rewards.chat_service import ModelReply, Replies, ask_service, readings
from rlhf_core.rewards.questions import (
    AGAIN,
    FIELD,
    FOLDER,
    FORM,
    LETTERS,
    RUBRIC,
    Judged,
    Pair,
    judged,
    letter_of,
    questions_of,
    rubric_text,
)
from rlhf_core.seeds import derive_seed
from rlhf_core.system.home import Home
from rlhf_core.types import RewardInput, StageContext

MEASURE = "language_model"
"""Its name in `evaluate.judge`."""


class LanguageModelJudge:
    """Compares answers. Replies are kept in `run.home`.

    Args:
        config: Configuration of the run, with `evaluate.language_model`.
        context: Context of the stage.
        device: Device of a model that is run here.
    """

    def __init__(self, config: PipelineConfig, context: StageContext, device: str) -> None:
        settings = config.evaluate.language_model
        assert settings is not None
        self._config, self._context, self._device = config, context, device
        self._settings = settings
        self._rubric = rubric_text(settings.rubric)
        digest = hashlib.sha256(self._rubric.encode()).hexdigest()
        # The key of the stage has the digest of what the judge read when the run began.
        if context.sources.get(RUBRIC, digest) != digest:
            raise ConfigError(f"{RUBRIC}: {settings.rubric} was changed after the run began; run again")
        if FOLDER in context.sources:
            now = model_digest(str(settings.path), None, config.run.home)
            if now != context.sources[FOLDER]:
                raise ConfigError(f"{FOLDER}: {settings.path} was changed after the run began; run again")
        self.digest = judge_digest(config, context.sources, digest)
        # On disk: a server does not give the same reply twice, and an attempt that was killed must end with
        # the same numbers (decision 8).
        self._replies = Replies(Home.of(config.run.home).judge, self.digest)
        self._asked: dict[str, ModelReply] = {}
        self._unparsed = 0
        self._agreement: dict[str, Any] = {}
        self._order: dict[str, float] = {}

    def measure_agreement(self) -> dict[str, float]:
        """Ask the judge about held-out pairs of people, and return its agreement with them as metrics.

        Raises:
            DataError: There are no such pairs.
        """
        pairs, groups = _held_out_pairs(self._context.data, self._settings.pairs)
        found = self._judge(pairs, "pairs")
        interval = Intervals(self._config).win_rate(found.preferences, groups)
        # Kept, because the metrics at the end of the stage contain it as well.
        self._agreement = {
            "agreement": interval.to_json(),
            "pairs": len(pairs),
            "pair_verdicts": asdict(Verdicts.of(found.preferences)),
            "pairs_inconsistent": found.inconsistent,
            "pairs_first": found.first,
        }
        return self.metrics()

    def compare(
        self, answers_a: Sequence[RewardInput], answers_b: Sequence[RewardInput], interval: Intervals
    ) -> Comparison:
        """Compare (n,) answers of two models to the same prompts.

        Args:
            answers_a: Answers of model `a`, whose wins are counted.
            answers_b: Answers of model `b`, in the same order.
            interval: Computes the interval, and knows the groups of the prompts.
        """
        preferences, groups = self.preferences(_pairs(answers_a, answers_b)), interval.groups(answers_a)
        return Comparison(interval.win_rate(preferences, groups), preferences, groups)

    def preferences(self, pairs: Sequence[Pair]) -> tuple[float, ...]:
        """Return the preferences (n,) in pairs of answers: 1 where `a` wins, 0.5 for a tie, 0 where `b` wins.

        The metrics about the order are those of the last call.
        """
        found = self._judge(pairs, "answers")
        self._order = {"inconsistent": found.inconsistent, "first": found.first}
        return found.preferences

    def prefer(
        self, answers: Mapping[str, list[RewardInput]], chosen: list[RewardInput]
    ) -> dict[str, tuple[float, ...]]:
        """Return the preferences (n,) of each model's answers over the data's own ones."""
        # In one call, because each call may start an engine.
        pairs: list[Pair] = []
        for own in answers.values():
            pairs += _pairs(own, chosen)
        found = self._judge(pairs, "chosen answers").preferences
        count = len(chosen)
        return {model: found[i * count : (i + 1) * count] for i, model in enumerate(answers)}

    def to_json(self) -> dict[str, Any]:
        """Return the entry about the judge in `evaluation.json`."""
        replies = self._asked.values()
        return {
            "name": self._settings.name,
            **self._agreement,
            **self._order,
            "requests": len(replies),
            "unparsed": self._unparsed,
            "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
            "completion_tokens": sum(reply.completion_tokens for reply in replies),
        }

    def metrics(self) -> dict[str, float]:
        """Return numbers about the judge: its agreement, bias, and what it cost.

        `seconds` is the sum over requests, of which several are made at a time, also of those that an earlier
        attempt made.
        """
        numbers: dict[str, float] = {}
        for name, value in self.to_json().items():
            if isinstance(value, Mapping):
                numbers |= {f"{MEASURE}/{name}/{part}": float(number) for part, number in value.items()}
            elif name != "name":
                numbers[f"{MEASURE}/{name}"] = float(value)
        numbers[f"{MEASURE}/seconds"] = sum(reply.seconds for reply in self._asked.values())
        return numbers

    def _judge(self, pairs: Sequence[Pair], what: str) -> Judged:
        questions = [questions_of(self._rubric, pair) for pair in pairs]
        # All questions in one call, because each call may start an engine.
        differing: list[str] = []
        for pair, asked in zip(pairs, questions, strict=True):
            if pair.a != pair.b:
                differing += asked
        letters = self._letters(differing, what)
        both = []
        for pair, (in_order, exchanged) in zip(pairs, questions, strict=True):
            # Equal answers are a tie, which costs nothing to know.
            both.append(None if pair.a == pair.b else (letters[in_order], letters[exchanged]))
        found = judged(both)
        self._unparsed += found.unparsed
        return found

    def _letters(self, questions: Sequence[str], what: str) -> dict[str, str | None]:
        """Return the letter of each question. A server that replies with something else is asked again
        once.
        """
        return readings(
            questions,
            lambda texts, again: self._ask(texts, f"{what} again" if again else what),
            letter_of,
            # A model that is run here can say nothing but a letter.
            AGAIN if self._settings.url is not None else "",
        )

    def _ask(self, questions: Sequence[str], what: str) -> dict[str, ModelReply]:
        replies, missing = self._replies.find_all(questions)
        total = len(replies) + len(missing)

        def keep(question: str, reply: ModelReply) -> None:
            # Each at once: what was answered is not asked again after a kill.
            replies[question] = self._replies.keep(question, reply)
            self._context.progress(f"judge {what}", len(replies), total, "questions")

        if missing and self._settings.path is not None:
            ask_local(
                self._config, Path(self._settings.path), missing, keep,
                device=self._device, context=self._context,
            )  # fmt: skip
        elif missing:
            ask_service(FIELD, self._settings, missing, keep)
        # By question, so that one that is asked twice in a stage is one request.
        self._asked |= replies
        return replies


def check_questions(config: PipelineConfig, data: Path) -> None:
    """Check, before anything is trained, what the judge will be asked about the data in `data`.

    The answers of the policies are not known yet. Questions about them have no answers here.

    Raises:
        DataError: There are no held-out pairs.
        ModelError: A local model has a context that is shorter than a question, or cannot say the letters.
    """
    settings = config.evaluate.language_model
    if settings is None:
        return
    pairs, _ = _held_out_pairs(data, settings.pairs)
    if settings.path is not None:
        prompts = load_prompts(data, "eval")[: config.evaluate.prompts]
        if config.labels_by_language_model:
            prompts = [*prompts, *load_prompts(data, "train")]
        # With empty answers, because those of the policies do not exist yet: this finds prompts that are too
        # long by themselves.
        pairs += [Pair(prompt.prompt, "", "") for prompt in prompts]
        rubric = rubric_text(settings.rubric)
        questions: list[str] = []
        for pair in pairs:
            questions += questions_of(rubric, pair)
        require_context(Path(settings.path), questions)


def _held_out_pairs(data: Path, most: int) -> tuple[list[Pair], list[str]]:
    """Return the held-out pairs that the agreement is measured with, and their groups. Raises DataError if
    there are none.
    """
    pairs, groups, of_models = held_out_pairs_of_people(data, most)
    if not pairs:
        cause = f"all {of_models} are of sources with `labelled_by`" if of_models else "got 0"
        raise DataError(
            "evaluate.language_model: its agreement is measured with held-out pairs that people labelled;"
            f" {cause}; raise data.eval_fraction or give more pairs of people"
        )
    return pairs, groups


def held_out_pairs_of_people(data: Path, most: int) -> tuple[list[Pair], list[str], int]:
    """Return held-out pairs whose labels are of people, with the chosen answer as `a`, the groups of their
    prompts, and the number of those that a model has labelled (`labelled_by` of their source).

    Args:
        data: Folder of the data artifact.
        most: Largest number of pairs.
    """
    decoder, labelled = load_decoder(data), sources_of_models(data)
    every = load_pairs(data, "eval")
    of_people = [pair for pair in every if pair.source not in labelled]
    pairs = []
    for pair in of_people[:most]:
        chosen, rejected = decoder.response(pair.chosen_ids), decoder.response(pair.rejected_ids)
        pairs.append(Pair(pair.prompt, chosen, rejected))
    groups = list(map(group_of, of_people[:most]))
    return pairs, groups, len(every) - len(of_people)


def _pairs(answers_a: Sequence[RewardInput], answers_b: Sequence[RewardInput]) -> list[Pair]:
    return [Pair(a.prompt, a.response, b.response) for a, b in zip(answers_a, answers_b, strict=True)]


def judge_digest(config: PipelineConfig, sources: Mapping[str, str], rubric: str) -> str:
    """Return the digest of the judge: which model, which rubric, which question. Only verdicts of equal
    judges are comparable.

    Args:
        config: Configuration of the run, with `evaluate.language_model`.
        sources: Digests of external inputs, with the one of the model's folder.
        rubric: Digest of the rubric.
    """
    settings = config.evaluate.language_model
    assert settings is not None
    if settings.path is None:
        # A service does not show its weights: another model behind the same name has the same digest.
        model: Any = [settings.url, settings.model, settings.max_tokens]
    else:
        # Settings of the engine, such as its dtype, can change verdicts.
        model = [sources.get(FOLDER, settings.path), result_settings(config.ppo.engine)]
    return hashlib.sha256(json.dumps([FORM, rubric, model], sort_keys=True).encode()).hexdigest()


_NAME = "evaluate.language_model.path"

_Asked = tuple[int, ...]
"""Tokens of a question."""


def ask_local(
    config: PipelineConfig,
    folder: Path,
    questions: Sequence[str],
    keep: Callable[[str, ModelReply], None],
    *,
    device: str,
    context: StageContext,
) -> None:
    """Ask all questions and call `keep(question, reply)` for each reply.

    A question that would contain a special token of the model gets an empty reply.

    Args:
        config: Configuration of the run.
        folder: Folder of the model.
        questions: (n,) questions.
        keep: Is called after each batch, or at the end if the engines are actors.
        device: Device of the engines.
        context: Context of the stage.

    Raises:
        ModelError: The model cannot be used.
    """
    encoder = _encoder(folder)
    letters = _letter_tokens(encoder, folder)
    encoded: list[tuple[str, _Asked]] = []
    for question, tokens in zip(questions, _tokens(encoder, questions), strict=True):
        if tokens is None:
            # An empty reply is no verdict, and so a tie: text of a policy must not become a special token of
            # the judge.
            keep(question, ModelReply("", 0, 0, 0.0))
        else:
            encoded.append((question, tokens))
    if not encoded:
        return
    prompts = [tokens for _, tokens in encoded]
    _check_length(folder, max(map(len, prompts)) + 1)

    def keep_part(start: int, chosen: Sequence[int], seconds: float) -> None:
        for index, token in enumerate(chosen, start):
            question, tokens = encoded[index]
            # By the place of the token: its text may have a blank before the letter.
            text = LETTERS[letters.index(token)]
            keep(question, ModelReply(text, len(tokens), 1, seconds / len(chosen)))

    if not needs_engine_actors(config, folder):
        _choose(config, folder, prompts, letters, device, keep_part)
        return
    began = time.monotonic()
    shares = on_engines(_choose_share, config, device, context, folder, prompts, letters)
    # Question i was in share i modulo the number of engines.
    chosen = [shares[i % len(shares)][i // len(shares)] for i in range(len(prompts))]
    keep_part(0, chosen, time.monotonic() - began)


def require_context(folder: Path, questions: Sequence[str]) -> None:
    """Raise ModelError if the model has no tokens for the letters, or a question is longer than its
    context.
    """
    encoder = _encoder(folder)
    _letter_tokens(encoder, folder)
    lengths = [len(tokens) for tokens in _tokens(encoder, questions) if tokens is not None]
    _check_length(folder, max(lengths, default=0) + 1)


def _encoder(folder: Path) -> Encoder:
    tokenizer = load_tokenizer(str(folder))
    return Encoder(tokenizer, "chat" if tokenizer.chat_template else "plain", str(folder))


def _tokens(encoder: Encoder, questions: Sequence[str]) -> Iterator[_Asked | None]:
    """Yield the tokens of each question; None if it would contain a special token of the model."""
    for question in questions:
        try:
            yield encoder.prompt([Message("user", question)])
        except EncodeError:
            yield None


def _letter_tokens(encoder: Encoder, folder: Path) -> list[int]:
    """Return the token of each letter."""
    # The last token, because some tokenizers put a blank before each text, which can be a token of its own.
    tokens = [encoder.tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in LETTERS]
    if len(set(tokens)) < len(LETTERS):
        raise ModelError(
            f"{_NAME}: the tokenizer of {folder} has no tokens for the letters A, B and C; use another model"
        )
    return tokens


def _check_length(folder: Path, tokens: int) -> None:
    # The engine computes windows, chunks and longrope itself, so `length_limits` of the policy do not apply.
    context = ModelFolder(folder).text_config.get("max_position_embeddings")
    if isinstance(context, int) and tokens > context:
        raise ModelError(
            f"{_NAME}: the longest question has {tokens} tokens, but {folder} has a context of {context}; use"
            " a judge with a longer context, or a shorter rubric"
        )


def _choose_share(
    rank: Rank,
    config: PipelineConfig,
    folder: Path,
    prompts: Sequence[_Asked],
    letters: Sequence[int],
    _context: StageContext | None,
) -> list[int]:
    """Answer the share of one engine in its own process."""
    chosen: list[int] = []
    share = prompts[rank.rank :: rank.world_size]
    # Empty if there are more engines than questions.
    if share:
        _choose(
            config, folder, share, letters, rank.device, lambda _start, part, _seconds: chosen.extend(part)
        )
    return chosen


def _choose(
    config: PipelineConfig,
    folder: Path,
    prompts: Sequence[_Asked],
    letters: Sequence[int],
    device: str,
    keep: Callable[[int, Sequence[int], float], None],
) -> None:
    """Call `keep(start, tokens, seconds)` for each batch of prompts, beginning at `start`."""
    # A reply is one token.
    context_tokens = max(map(len, prompts)) + 1
    seed = derive_seed(config.run.seed, "evaluate") % 2**31
    # In batches, so that replies are kept before the last question is answered.
    size = config.ppo.engine.max_num_seqs
    with running_engine(config, folder, device, max_model_len=context_tokens, seed=seed) as engine:
        for start in range(0, len(prompts), size):
            began = time.monotonic()
            chosen = engine.choose(prompts[start : start + size], letters)
            keep(start, chosen, time.monotonic() - began)
