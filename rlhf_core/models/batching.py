"""Ragged sequences <-> the tensors of one forward pass.

Axes: `B` rows, `L` columns, `N` selected tokens of the whole micro-batch (those with a label), `S` sequences.

Two layouts, both without an attention mask over padding:
  padded  one sequence per row, real tokens first. Causal attention never looks right, so padding at the end
          cannot change a real token.
  packed  all sequences in one row, position ids restart with each; attention is cut at the borders
          (`models.attention`).

Sequences are assigned to micro-batches and ranks from their lengths alone (`plan_ranks`). Every rank gets the
same number of micro-batches, because collectives inside a forward pass (ZeRO-3) and at its end need equal
counts. Micro-batches that run at the same time have nearly the same cost, and so have the ranks in total.
"""

from __future__ import annotations

import heapq
import math
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
            # By default transformers collects the keys and values of all layers, which nothing here reads.
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
        # Kernels for sequences of different lengths take borders of int32 only.
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


_ATTENTION_EQUALS_LINEAR = 24_576
"""Tokens of a sequence at which causal attention costs as much as all linear layers: six times the width of
the model (Kaplan et al. 2020, table 1), here 4096. It only spreads the work, so it need not be exact.
"""


def plan_ranks(
    lengths: Sequence[int], ranks: int, budget: int, *, pack: bool = False
) -> list[list[list[int]]]:
    """Return the indices of `lengths` by rank and micro-batch, each once. The heaviest micro-batches and the
    longest sequences come first.

    A micro-batch holds at most `budget` tokens, padding included unless `pack`; a longer sequence is alone in
    its own. Any number of sequences goes on any number of ranks: where there are too few, micro-batches are
    empty.
    """
    if budget < 1 or ranks < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"ranks, budget and lengths must be at least 1; got {ranks}, {budget}, {min(lengths, default=1)}"
        )
    # Each rank makes the whole plan for itself. The sort is stable, so all ranks make the same one.
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups = (_packed if pack else _padded)([lengths[i] for i in order], ranks, budget)
    costs = [estimated_cost(lengths[i]) for i in order]
    groups.sort(key=lambda group: sum([costs[place] for place in group]), reverse=True)
    # In snake order: groups that run at the same time have similar costs, and the rank with the most
    # expensive group of a round has the cheapest one of the next round.
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn, start in enumerate(range(0, len(groups), ranks)):
        row = groups[start : start + ranks]
        if turn % 2 == 1:
            row.reverse()
        for rank, group in enumerate(row):
            plan[rank].append([order[place] for place in group])
    return plan


def estimated_cost(length: int) -> int:
    """Return the cost of one sequence, in the unit of one token's linear layers."""
    return length * (_ATTENTION_EQUALS_LINEAR + length)


def _packed(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Return groups of nearly equal cost, as few as possible, in a multiple of `ranks`."""
    # No two sequences that are longer than half the budget fit into one group.
    long_sequences = sum([2 * length > budget for length in lengths])
    least = max(1, long_sequences, math.ceil(sum([min(length, budget) for length in lengths]) / budget))
    count = math.ceil(least / ranks)
    costs = [estimated_cost(length) for length in lengths]
    while True:
        groups = _filled(lengths, costs, count * ranks, budget)
        if groups is not None:
            return groups
        # In steps of a hundredth: with thousands of groups, steps of one would fill them too often.
        count += 1 + count // 100


def _filled(lengths: Sequence[int], costs: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Put each sequence, longest first, into the cheapest of `count` groups that has room. Return the groups,
    or None if one finds no room.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, index) for index in range(count)]  # (cost, tokens, group)
    for place, length in enumerate(lengths):
        full = []
        # An empty group has room for a sequence of any length.
        while heap and heap[0][1] and heap[0][1] + length > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, tokens, index = heap[0]
        groups[index].append(place)
        heapq.heapreplace(heap, (cost + costs[place], tokens + length, index))
        # They may have room for a shorter sequence.
        for entry in full:
            heapq.heappush(heap, entry)
    return groups


def _padded(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Return groups of neighbours in length, so that there is little padding; the largest are halved up to a
    multiple of `ranks`.
    """
    groups: list[list[int]] = []
    for place in range(len(lengths)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= budget:
            groups[-1].append(place)
        else:
            groups.append([place])
    while not groups or len(groups) % ranks:
        splittable = [group for group in groups if len(group) > 1]
        if not splittable:
            groups.append([])
            continue
        group = max(splittable, key=lambda group: len(group) * lengths[group[0]])
        # Not in the middle: the rows of the first part are wider, so that it has room for fewer.
        cut = min(
            range(1, len(group)),
            key=lambda cut: max(cut * lengths[group[0]], (len(group) - cut) * lengths[group[cut]]),
        )
        groups.remove(group)
        groups += [group[:cut], group[cut:]]
    return groups
