"""Asks a language model in a local folder, by the engines of the evaluation (`evaluate.engines`).

The model may only generate the tokens of the letters A, B and C, so that every reply is a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.data.messages import Message
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.engines.distributed import Rank
from rlhf_core.errors import ModelError
from rlhf_core.evaluation.generate import needs_engine_actors, on_engines, running_engine
from rlhf_core.models.folder import ModelFolder
from rlhf_core.rewards.chat_service import ModelReply
from rlhf_core.rewards.questions import LETTERS
from rlhf_core.seeds import derive_seed
from rlhf_core.types import StageContext

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
    size = config.ppo.engine.max_num_seqs
    with running_engine(config, folder, device, max_model_len=context_tokens, seed=seed) as engine:
        for start in range(0, len(prompts), size):
            began = time.monotonic()
            chosen = engine.choose(prompts[start : start + size], letters)
            keep(start, chosen, time.monotonic() - began)
