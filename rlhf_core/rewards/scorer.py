"""A trained reward model that scores items of the protocol in `remote`, tokenised as the pipeline does it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf_core.data.formats import normalise
from rlhf_core.data.messages import RowError
from rlhf_core.data.templates import EncodeError, Encoder
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import ModelError
from rlhf_core.models.check import length_limits
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.score import is_classifier, load_score_model
from rlhf_core.models.scoring import (
    combined,
    load_ensemble,
    member_folders,
    sequence_scores,
    single_process_batches,
)
from rlhf_core.types import PromptAndResponse


class ItemError(ValueError):
    """This item has no score; the message is the reason."""


class Scorer:
    """A reward model with its tokenizer.

    One thread can call `encode` while another one calls `scores`. Neither may run in two threads at once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        template: Literal["chat", "plain"] | None = None,
        dtype: str = "float32",
        attention: Literal["sdpa", "eager"] = "sdpa",
        device: str = "cpu",
        micro_batch_tokens: int = 16384,
    ) -> None:
        """Load the model. Raises `ModelError` if the folder has no reward model.

        Args:
            folder: Model, tokenizer and statistics, as in `model/` of the `reward` artifact; with its members
                if it is an ensemble.
            template: How prompts are rendered; None for chat if the tokenizer has a template, else plain.
            dtype: Data type of the weights.
            attention: Implementation of attention; `eager` also computes sliding windows and chunks.
            device: `cpu` or `cuda`.
            micro_batch_tokens: Maximum number of tokens of one forward pass.
        """
        if not ModelFolder(folder).has_config:
            raise ModelError(
                f"{folder} must hold a reward model (config.json is missing); give the `reward` artifact"
            )
        if not is_classifier(folder):
            raise ModelError(
                f"{folder} must hold a reward model; got one that generates text; give the `reward` artifact"
            )
        tokenizer = load_tokenizer(str(folder))
        kind = template or ("chat" if tokenizer.chat_template else "plain")
        self._encoder = Encoder(tokenizer, kind, str(folder))
        self._ensemble = load_ensemble(folder)
        self._models = [
            load_score_model(member, dtype=dtype, attention=attention, device=device).eval()
            for member in member_folders(folder)
        ]
        self._pad_id = int(tokenizer.pad_token_id)
        shape = self._models[0].lm.config
        self._vocabulary = int(shape.vocab_size)
        limits = length_limits(shape.to_dict(), attention)
        self._limit_field = min(limits, key=limits.__getitem__)
        self._most_tokens = limits[self._limit_field]
        self.micro_batch_tokens = micro_batch_tokens
        """Maximum number of tokens of one forward pass."""

    def encode(self, item: Any) -> PromptAndResponse:
        """Return the ((P,), (T,)) tokens of prompt and response: the item's own, or those of its texts.

        A finished response ends with EOS, as in the pairs that the model was trained on and in the policy's
        rollouts. Raises `ItemError`.
        """
        if not isinstance(item, Mapping):
            raise ItemError(f"an item must be an object; got {type(item).__name__}")
        if "prompt_ids" in item or "response_ids" in item:
            pair = self._ids(item, "prompt_ids"), self._ids(item, "response_ids")
        else:
            pair = self._texts(item)
        length = len(pair[0]) + len(pair[1])
        if length > self._most_tokens:
            raise ItemError(
                f"prompt and response have {length} tokens, but the model takes {self._most_tokens}"
                f" ({self._limit_field})"
            )
        if not pair[1]:
            raise ItemError("the response has no tokens")
        return pair

    def scores(self, pairs: Sequence[PromptAndResponse]) -> list[float]:
        """Return the (n,) scores, normalised by the stored statistics; of an ensemble, the combined ones."""
        by_member = []
        for model in self._models:
            batches = single_process_batches(model, pairs, self.micro_batch_tokens, self._pad_id)
            by_member.append(sequence_scores(model, model.statistics, batches))
        scores = combined(self._ensemble, by_member)
        return [score if math.isfinite(score) else math.nan for score in scores]

    def _ids(self, item: Mapping[str, Any], name: str) -> tuple[int, ...]:
        ids = item.get(name)
        # Not `isinstance`, which takes true and false for integers.
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < self._vocabulary for i in ids):
            raise ItemError(f"{name} must be a list of token ids from 0 to {self._vocabulary - 1}")
        return tuple(ids)

    def _texts(self, item: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of a prompt and a response that are given as text. Raises ItemError."""
        response, finished = item.get("response"), item.get("finished", True)
        if not isinstance(response, str) or not isinstance(finished, bool):
            raise ItemError("response must be a string, and finished true or false")
        try:
            row = {"prompt": item.get("prompt"), "tools": item.get("tools")}
            record = normalise(row, "prompt", thoughts="keep")
            for text in (response, record.prompt_text):
                text.encode()
            # Before the tokenizer: a text of 10 MB took 85 s and 2.4 GB there.
            if any(
                self._encoder.surely_longer(text, self._most_tokens)
                for text in (record.prompt_text, response)
            ):
                raise ItemError(
                    f"prompt and response do not fit the {self._most_tokens} tokens that the model takes"
                    f" ({self._limit_field})"
                )
            # A policy may end at once, but `Encoder.response` refuses a response without tokens.
            if not response:
                prompt_ids = self._encoder.prompt(record.prompt, record.tools)
                return prompt_ids, (self._encoder.eos_id,) if finished else ()
            prompt_ids, response_ids = self._encoder.response(record.prompt, response, record.tools)
        except UnicodeEncodeError as error:
            raise ItemError("its texts must be Unicode, without lone surrogates") from error
        except (RowError, EncodeError) as error:
            raise ItemError(str(error)) from error
        if not finished:
            response_ids = response_ids[:-1]  # EOS, which the encoder adds
        return prompt_ids, response_ids
