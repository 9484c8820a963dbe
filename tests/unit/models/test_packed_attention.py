"""The backward pass of attention over a packed row.

- its gradients are those of a call for each sequence, to the bit
- it writes no zeros for the whole row for each sequence, as the backward of a slice does
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_core.models.attention import implementation

LENGTHS = (7, 7, 5, 3, 3, 3, 1)
BORDERS = tuple(accumulate(LENGTHS, initial=0))
MODULE = SimpleNamespace(is_causal=True)


def inputs() -> list[torch.Tensor]:
    """Queries, keys and values (1, heads, L, d)."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, BORDERS[-1], 8)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def attend(rows: list[torch.Tensor]) -> torch.Tensor:
    name = implementation("sdpa")
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS[name](MODULE, *rows, None, cu_seq_lens_q=BORDERS)[0]
    return output


def gradients(output: torch.Tensor, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), rows))


def test_gradients_are_those_of_a_call_for_each_sequence() -> None:
    rows, alone = inputs(), inputs()
    parts = [
        sdpa_attention_forward(MODULE, *(x[:, :, a:b] for x in alone), None, is_causal=True)[0]
        for a, b in pairwise(BORDERS)
    ]
    expected = torch.cat(parts, dim=1)
    output = attend(rows)
    assert torch.equal(output, expected)
    for found, wanted in zip(gradients(output, rows), gradients(expected, alone), strict=True):
        assert torch.equal(found, wanted)


def test_the_backward_pass_writes_no_zeros_for_each_sequence() -> None:
    nodes: Counter[str] = Counter()
    todo = [attend(inputs()).grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            nodes[node.name()] += 1
            todo += [following for following, _ in node.next_functions]
    assert not {name for name in nodes if name.startswith(("SliceBackward", "SelectBackward"))}, nodes
