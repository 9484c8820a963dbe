"""Ragged sequences <-> the tensors of one forward pass.

Axes: `B` rows, `L` columns, `N` selected tokens of the whole micro-batch (those with a label), `S` sequences.

Two layouts, both without an attention mask over padding:
  padded  one sequence per row, real tokens first. Causal attention never looks right, so padding at the end
          cannot change a real token.
  packed  all sequences in one row, position ids restart with each; attention is cut at the borders
          (`models.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from rlhf_core.models.attention import NAME as OWN_ATTENTION


@dataclass(frozen=True)
class TokenSequence:
    """One sequence with the mask of its target tokens."""

    input_ids: tuple[int, ...]
    """(L,)"""
    target_mask: tuple[int, ...]
    """(L,) 1 where the token is a target; the first token never is."""

    @staticmethod
    def of(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TokenSequence:
        """Return a sequence whose targets are the response tokens."""
        return TokenSequence(
            tuple(prompt_ids) + tuple(response_ids), (0,) * len(prompt_ids) + (1,) * len(response_ids)
        )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def targets(self) -> int:
        """Number of targets. The first token is never one, because nothing precedes it."""
        return sum(self.target_mask[1:])


@dataclass(frozen=True)
class TokenBatch:
    """Tensors of one forward pass, int64 unless stated otherwise."""

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor | None
    """None in the padded layout, where the model counts 0, 1, 2, ... itself."""
    select_N: torch.Tensor
    """Flat positions in B*L whose NEXT token is a target, sequence by sequence."""
    labels_N: torch.Tensor
    """The targets."""
    last_S: torch.Tensor
    """Flat position of the last real token of each sequence (where a score head reads)."""
    counts: tuple[int, ...]
    """(S,) targets of each sequence, so `split` can undo the concatenation."""
    borders: tuple[int, ...] | None = None
    """(S+1,) where sequences begin and end in a packed row; None in the padded layout."""
    borders_S: torch.Tensor | None = None
    """(S+1,) the same as int32 on the device, for kernels."""

    def model_inputs(self, attention: str) -> dict[str, Any]:
        """Return the arguments of a Hugging Face backbone with this attention.

        Ours and flash attention get the borders; others see them in the positions.
        """
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids_BL,
            "position_ids": self.position_ids_BL,
            "use_cache": False,
        }
        if self.borders is None or attention not in (OWN_ATTENTION, "flash_attention_2"):
            return inputs
        longest = max(end - start for start, end in pairwise(self.borders))
        # Ours cuts the row at Python integers: reading them from the device would wait for the GPU.
        inputs["cu_seq_lens_q"] = self.borders if attention == OWN_ATTENTION else self.borders_S
        # Without these, transformers derives them from the positions in every layer, and waits for the GPU.
        inputs |= {"cu_seq_lens_k": self.borders_S, "max_length_q": longest, "max_length_k": longest}
        return inputs

    def to(self, device: torch.device | str) -> TokenBatch:
        return TokenBatch(
            to_device(self.input_ids_BL, device),
            None if self.position_ids_BL is None else to_device(self.position_ids_BL, device),
            to_device(self.select_N, device),
            to_device(self.labels_N, device),
            to_device(self.last_S, device),
            self.counts,
            self.borders,
            None if self.borders_S is None else to_device(self.borders_S, device),
        )

    def split(self, values_N: torch.Tensor) -> list[torch.Tensor]:
        """Split (N,) values into S tensors of (T,)."""
        parts: list[torch.Tensor] = list(torch.split(values_N, list(self.counts)))
        return parts


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of the host on `device`. A copy to a GPU does not wait for the GPU's earlier work."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Torch frees the pinned memory after the copy.
    return tensor.pin_memory().to(device, non_blocking=True)


def collate(sequences: Sequence[TokenSequence], *, pad_id: int, pack: bool = False) -> TokenBatch:
    """Collate one micro-batch.

    An empty list gives one token without targets, for ranks that must take part in a collective operation.
    """
    if not sequences:
        sequences = [TokenSequence((pad_id,), (0,))]
    select: list[int] = []
    labels: list[int] = []
    counts: list[int] = []
    last: list[int] = []
    width = max(map(len, sequences))
    start = 0
    for sequence in sequences:
        targets = [t for t in range(1, len(sequence)) if sequence.target_mask[t]]
        select += [start + t - 1 for t in targets]
        labels += [sequence.input_ids[t] for t in targets]
        counts.append(len(targets))
        last.append(start + len(sequence) - 1)
        start += len(sequence) if pack else width
    borders: tuple[int, ...] | None = None
    borders_S: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    if pack:
        borders = tuple(accumulate(map(len, sequences), initial=0))
        borders_S = torch.tensor(borders, dtype=torch.int32)
        row: list[int] = []
        row_positions: list[int] = []
        for sequence in sequences:
            row += sequence.input_ids
            row_positions += range(len(sequence))
        input_ids = torch.tensor([row])
        positions = torch.tensor([row_positions])
    else:
        input_ids = torch.full((len(sequences), width), pad_id)
        for index, sequence in enumerate(sequences):
            input_ids[index, : len(sequence)] = torch.tensor(sequence.input_ids)
    return TokenBatch(
        input_ids,
        positions,
        # With an explicit type, because an empty list would become float32.
        torch.tensor(select, dtype=torch.long),
        torch.tensor(labels, dtype=torch.long),
        torch.tensor(last, dtype=torch.long),
        tuple(counts),
        borders,
        borders_S,
    )
