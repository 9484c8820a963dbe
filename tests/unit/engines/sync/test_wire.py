"""Checksums and buckets of weight sync.

- one altered bit, a swap, a dropped or an extra tensor is noticed and named; so is a wrong version
- a checksum depends on the bits alone, not on layout in memory or on how it was chunked
- both sides cut the same buckets, and what is packed comes out as it went in
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.engines.sync.wire import (
    Acknowledgement,
    TensorSpec,
    cut,
    pack,
    tensor_checksum,
    unpack,
    verify,
)
from rlhf_core.errors import WeightSyncError


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 59), st.integers(0, 31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_one_flipped_bit_anywhere_changes_the_checksum(index: int, bit: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(60, dtype=torch.float32).sub(30).to(dtype).view(6, 10)
    altered = tensor.clone()
    integers = altered.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
    integers[index] ^= 1 << (bit % (8 * dtype.itemsize - 1))
    assert tensor_checksum(altered) != tensor_checksum(tensor)


def test_swapped_elements_change_the_checksum() -> None:
    assert tensor_checksum(torch.tensor([1.0, 2.0])) != tensor_checksum(torch.tensor([2.0, 1.0]))


def test_minus_zero_is_not_zero() -> None:
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))


def test_the_checksum_does_not_depend_on_strides() -> None:
    tensor = torch.randn(7, 11)
    assert tensor_checksum(tensor.t().contiguous().t()) == tensor_checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_the_checksum_does_not_depend_on_chunks(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**15), 2**15, (600_001,)).to(dtype)  # three chunks
    before = bits.clone()
    weighted = bits.long() * (torch.arange(len(bits)) * 2654435761 * 2 + 1)
    sums = [int(each.sum()) % 2**64 for each in (bits.long(), weighted)]
    assert tensor_checksum(bits) == f"{sums[0]:016x}{sums[1]:016x}"
    assert torch.equal(bits, before)
    assert tensor_checksum(bits[:0]) == "0" * 32


SENT = {"a": "1", "b": "2"}


def test_equal_version_and_checksums_pass() -> None:
    verify(SENT, 3, [Acknowledgement(0, 3, dict(SENT)), Acknowledgement(1, 3, dict(SENT))])


@pytest.mark.parametrize(
    ("acknowledgement", "words"),
    [
        (Acknowledgement(1, 2, SENT), "engine 1 acknowledged policy version 2, but 3"),
        (Acknowledgement(1, 3, {"a": "1", "b": "9"}), "1 of 2 tensors differ (b)"),
        (Acknowledgement(1, 3, {"a": "1"}), "1 of 2 tensors differ (b)"),
        (Acknowledgement(1, 3, {**SENT, "c": "3"}), "1 of 2 tensors differ (c)"),
    ],
)
def test_any_difference_is_an_error_that_names_the_tensor(
    acknowledgement: Acknowledgement, words: str
) -> None:
    with pytest.raises(WeightSyncError) as caught:
        verify(SENT, 3, [Acknowledgement(0, 3, SENT), acknowledgement])
    assert words in str(caught.value)


def test_buckets_keep_order_and_limit() -> None:
    specs = [
        TensorSpec(name, torch.float32, (size,)) for name, size in [("a", 2), ("b", 2), ("c", 9), ("d", 1)]
    ]
    assert [[s.name for s in bucket] for bucket in cut(specs, 16)] == [["a", "b"], ["c"], ["d"]]


def test_unpack_inverts_pack() -> None:
    tensors = [torch.randn(3, 2), torch.randn(5).bfloat16(), torch.randn(2, 2).t()]
    specs = [TensorSpec(str(i), t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    for before, after in zip(tensors, unpack(pack(tensors), specs), strict=True):
        assert torch.equal(before, after)
