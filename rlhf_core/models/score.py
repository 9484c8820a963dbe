"""Score heads: the reward model (one score per sequence) and the critic (one value per response token).

Both are Hugging Face sequence-classification models with one label: a linear head without bias on the last
hidden state, so `AutoModelForSequenceClassification` opens what is saved here. The head computes in float32:
bfloat16 has 128 numbers between 1 and 2, and the scores of two responses must not become one.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.training import LoraConfig, Packing
from rlhf_core.errors import ModelError, NonFiniteError
from rlhf_core.models.architectures import OTHER_MODEL
from rlhf_core.models.batching import TokenBatch
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.linear import Float32Linear, use_onednn
from rlhf_core.models.policy import DTYPES
from rlhf_core.models.saving import WeightStream, save_model
from rlhf_core.models.selftest import tested, without_dropout
from rlhf_core.models.sharded import Shards
from rlhf_core.models.weights import (
    load_pretrained,
    loading_options,
    model_config,
    model_errors,
    refuse_non_finite,
    self_test_context,
)
from rlhf_core.system.files import write_json

_HEAD = "score.weight"
_STATISTICS = "score_statistics.json"


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean and standard deviation of raw scores on held-out responses, stored with the reward model."""

    mean: float = 0.0
    std: float = 1.0

    @staticmethod
    def of(scores: torch.Tensor) -> ScoreStatistics:
        """Return the statistics of raw scores of any shape.

        Raises NonFiniteError if the scores do not vary or are not finite.
        """
        std = scores.std().item()
        if not 0 < std < math.inf:
            raise NonFiniteError(
                f"reward: the scores on held-out pairs have standard deviation {std}; nothing was learned"
            )
        return ScoreStatistics(scores.mean().item(), std)

    def normalize(self, scores_S: torch.Tensor) -> torch.Tensor:
        return (scores_S - self.mean) / self.std

    def save(self, folder: Path) -> None:
        write_json(folder / _STATISTICS, asdict(self))

    @staticmethod
    def load(folder: Path) -> ScoreStatistics:
        """Read the stored statistics. A model without them, such as a critic, counts as normalised."""
        path = folder / _STATISTICS
        if not path.is_file():
            return ScoreStatistics()
        return ScoreStatistics(**json.loads(path.read_text()))


class ScoreModel(nn.Module):
    """A backbone with a score head."""

    lora: LoraConfig | None = None
    """The adapter, if there is one (`models.adapters`). The head is then trained in addition to it."""
    packs = True
    """Whether sequences can share a row (`models.selftest`)."""
    has_new_head = False
    """Whether the weights of the head are random, because the model was loaded from a causal LM."""

    def __init__(self, classifier: Any, statistics: ScoreStatistics | None = None) -> None:
        super().__init__()
        self.lm = classifier
        self.statistics = statistics or ScoreStatistics()
        # Only the class changes, so that the weight keeps the name that transformers reads.
        self.lm.score.__class__ = Float32Linear
        self._scale, self._offset = 1.0, 0.0

    def become_critic(self, weight: float) -> None:
        """Give the head the scale of the rewards, so that the first values are not noise.

        Statistics of a reward model and its `weight` in the score are folded into the head. A new head
        becomes zero: with random weights its values have size 1 whatever the rewards are.
        """
        head = self.lm.score.weight
        scale = self.statistics.std / weight
        # A power of two divides the weights of every precision exactly.
        # `abs`, because a reward model can have a negative weight in the score.
        divisor = scale if head.dtype == torch.float32 else 2.0 ** round(math.log2(abs(scale)))
        with torch.no_grad():
            head.div_(divisor)
            if self.has_new_head:
                head.zero_()
        self._scale, self._offset = divisor / scale, self.statistics.mean / scale
        self.statistics = ScoreStatistics()

    def forward(self, batch: TokenBatch, at: Literal["last", "tokens"]) -> torch.Tensor:
        """Return float32 outputs of the head, not normalised unless the statistics were folded in.

        With `at="last"`, the (S,) scores at the last token of each sequence. With `at="tokens"`, the (N,)
        values before each target token.
        """
        inputs = batch.model_inputs(self.lm.config._attn_implementation)
        hidden_BLH = self.lm.model(**inputs).last_hidden_state
        positions = {"last": batch.last_S, "tokens": batch.select_N}[at]
        hidden = hidden_BLH.flatten(0, 1).index_select(0, positions)
        values: torch.Tensor = self.lm.score(hidden).squeeze(-1)
        return values * self._scale - self._offset

    def save(self, folder: Path, weights: WeightStream | None = None) -> None:
        """Write the model in Hugging Face layout, and the statistics. `weights` replaces its own, which must
        be whole otherwise.
        """
        save_model(self.lm, folder, weights)
        self.statistics.save(folder)


def load_score_model(
    folder: Path | str,
    *,
    dtype: str,
    attention: str,
    device: str,
    revision: str | None = None,
    quantize: str | None = None,
    pack: Packing = "auto",
    shards: Shards | None = None,
) -> ScoreModel:
    """Load a score model from a causal LM (new head, N(0, 1/(h+1))) or from a saved score model. Seed torch
    first.

    Args:
        folder: A folder with a causal LM or a score model, or a hub id of a causal LM.
        dtype: Data type of the weights, a name of `policy.DTYPES`.
        attention: transformers' name of the implementation.
        device: Device of a quantized model.
        revision: Commit or branch of a hub id.
        quantize: `nf4` stores linear layers in 4 bits (`models.weights`).
        pack: Whether rows hold several sequences (`models.selftest`).
        shards: Cuts the parameters while they are read (`models.sharded`); loading is then a collective
            operation. Quantized weights are not cut.

    Raises:
        ModelError: If the weights do not match the model, or if the self-test fails.
    """
    from transformers import AutoModelForSequenceClassification

    if quantize is not None:
        shards = None
    with model_errors(folder):
        from_causal = is_hub_model(str(folder)) or not is_classifier(Path(folder))
        # Two labels are the default of transformers.
        config = model_config(folder, attention=attention, revision=revision, num_labels=1)
        options = {"dtype": DTYPES[dtype], **loading_options(quantize, DTYPES[dtype], device)}
        if from_causal:
            options["new"] = (_HEAD,)
        model = load_pretrained(
            AutoModelForSequenceClassification, folder, config, revision=revision, shards=shards, **options
        )
    if not hasattr(model, "score") or not hasattr(model, "model"):
        raise ModelError(
            f"model.path: {type(model).__name__} has no `model` and `score`, which the training calls;"
            f" {OTHER_MODEL}"
        )
    # In place of the `initializer_range` with which transformers fills a missing head.
    # The variance is that of Stiennon et al. 2020, "Learning to summarize from human feedback".
    if from_causal:
        nn.init.normal_(
            model.score.weight, std=1.0 / math.sqrt(model.config.get_text_config().hidden_size + 1)
        )
    scorer = ScoreModel(use_onednn(without_dropout(model)).to(device), ScoreStatistics.load(Path(folder)))
    scorer.has_new_head = from_causal
    refuse_non_finite(folder, model)
    with self_test_context(folder, model, shards):
        scorer.packs = tested(model, pack)
    return scorer


def is_classifier(folder: Path) -> bool:
    """Return whether a folder has a saved score model. Otherwise it has a causal LM."""
    names = ModelFolder(folder).config.get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in names)
