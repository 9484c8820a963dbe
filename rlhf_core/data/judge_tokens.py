"""Checks the base model of the judge (`reward.judge.path`): its tokens must be those of the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_core.config import PipelineConfig
from rlhf_core.config.address import JUDGE_PATH, BaseModelAddress, base_of, is_hub_model, is_reference
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import ConfigError, Finding, ModelError


def check_base_of_judge(config: PipelineConfig) -> Iterator[Finding]:
    """Check that the base model of the judge exists and has the tokens of a local `model.path`."""
    judge, base = base_of(config, "judge"), config.model.path
    if judge is None:
        return
    if judge.is_hub:
        yield from judge.unpinned()
        return
    if not (Path(judge.path) / "config.json").is_file():
        yield ConfigError(
            f"{JUDGE_PATH}: must be a folder in Hugging Face layout, or a hub id as owner/name; got"
            f" {judge.path}, which has no config.json; correct it, or leave it out"
        )
        return
    if base is not None and not is_reference(base) and not is_hub_model(base):
        try:
            require_same_tokens(judge, Path(base))
        except ModelError as error:
            yield ConfigError(error.message)


def require_same_tokens(judge: BaseModelAddress, tokenizer: Path) -> None:
    """Raise ModelError unless the base model of the judge has the tokens of another folder.

    Pairs and responses are stored as tokens, which the judge scores as they are.

    Args:
        judge: Its base model.
        tokenizer: Folder with a tokenizer: that of the data, or of the base model of the policy.
    """
    own = load_tokenizer(judge.path, judge.revision).get_vocab()
    others = load_tokenizer(str(tokenizer)).get_vocab()
    if any(own.get(token) != number for token, number in others.items()):
        raise ModelError(
            f"{JUDGE_PATH}: {judge.path} has other tokens than the policy; use a model of the same family, or"
            " leave it out"
        )
