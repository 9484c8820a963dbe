"""A small data artifact, for tests of stages that read one.

folder = write_data_artifact(tmp_path / "data", eval_prompts=[PromptExample("p", "What is it?", (1, 5, 6))])
context = stage_context(tmp_path, inputs={"data": folder})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.data.dataset import write
from rlhf_core.data.tokenizer import save_tokenizer, train_tokenizer
from rlhf_core.types import PairExample, PromptExample, SFTExample


def write_data_artifact(
    folder: Path,
    *,
    sft: Sequence[SFTExample] = (),
    pairs: Sequence[PairExample] = (),
    prompts: Sequence[PromptExample] = (),
    eval_sft: Sequence[SFTExample] = (),
    eval_pairs: Sequence[PairExample] = (),
    eval_prompts: Sequence[PromptExample] = (),
    tokenizer: Any = None,
    counts: Mapping[str, Any] | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the token files, the tokenizer and a short card of a data artifact, and return `folder`.

    Args:
        folder: Is created.
        sft: Demonstrations of the training split.
        pairs: Preference pairs of the training split.
        prompts: Prompts of the training split.
        eval_sft: Demonstrations that are held out.
        eval_pairs: Preference pairs that are held out.
        eval_prompts: Prompts that are held out.
        tokenizer: Default: one token for each printable ASCII character, with pad 0, BOS 1 and EOS 2.
        counts: `counts` of `data_card.json`. Default: none.
        sources: `sources` of `data_card.json`.

    Raises:
        FileExistsError: The folder has a data artifact.
    """
    (folder / "tokenizer").mkdir(parents=True)
    save_tokenizer(tokenizer or train_tokenizer([], 0), folder / "tokenizer")
    write(folder, "sft", "train", sft)
    write(folder, "pairs", "train", pairs)
    write(folder, "prompts", "train", prompts)
    write(folder, "sft", "eval", eval_sft)
    write(folder, "pairs", "eval", eval_pairs)
    write(folder, "prompts", "eval", eval_prompts)
    card = {"counts": dict(counts or {}), "sources": [dict(source) for source in sources]}
    (folder / "data_card.json").write_text(json.dumps(card))
    return folder
