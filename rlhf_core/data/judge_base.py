"""The base model of the judge (`reward.judge.path`), if it is not the SFT model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import is_hub_model, is_reference
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import ConfigError, Finding, ModelError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.models.shape import ModelShape

JUDGE_PATH = "reward.judge.path"


def base_of_judge(config: PipelineConfig) -> Path | None:
    """Return the folder of the base model of the judge; None if it is the SFT model."""
    judge = config.reward.judge
    return None if judge is None or judge.path is None else Path(judge.path)


def shape_of_stage(config: PipelineConfig, stage: str, shape: ModelShape) -> ModelShape:
    """Return the shape of the model of a stage. It is `shape`, that of the policy, except for a judge with
    another base model that can be read here.
    """
    folder = base_of_judge(config) if stage == "judge" else None
    try:
        return shape if folder is None else ModelFolder(folder).shape
    except ModelError:
        return shape


def check_base_of_judge(config: PipelineConfig) -> Iterator[Finding]:
    """Check that there is such a model, and that its tokens are those of a local `model.path`."""
    folder, base = base_of_judge(config), config.model.path
    if folder is None:
        return
    if not (folder / "config.json").is_file():
        yield ConfigError(
            f"{JUDGE_PATH}: must be a folder in Hugging Face layout; got {folder}, which has no config.json;"
            " correct it, or leave it out"
        )
        return
    if base is not None and not is_reference(base) and not is_hub_model(base):
        try:
            require_same_tokens(folder, Path(base))
        except ModelError as error:
            yield ConfigError(error.message)


def require_same_tokens(folder: Path, tokenizer: Path) -> None:
    """Raise ModelError unless a model has the tokens of another folder.

    Pairs and responses are stored as tokens, which the judge scores as they are.

    Args:
        folder: Of the base model of the judge.
        tokenizer: Folder with a tokenizer: that of the data, or of the base model of the policy.
    """
    own, others = load_tokenizer(str(folder)).get_vocab(), load_tokenizer(str(tokenizer)).get_vocab()
    if any(own.get(token) != number for token, number in others.items()):
        raise ModelError(
            f"{JUDGE_PATH}: {folder} has other tokens than the policy; use a model of the same family, or"
            " leave it out"
        )
