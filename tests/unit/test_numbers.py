"""`Numbers`: the token ids of a response, which are read like a tuple.

- length, index, slice, iteration, `in`, `index`, `+`, `==` and `hash` are those of the tuple of the same
  numbers, also beside an array
- they are an array without a copy, that cannot be written, and that is not copied for a slice
- a copy and what a pickle gives are equal
- a user's function in its own process can do the same with the tokens of its samples
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.rewards import PythonReward
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.testing import reward_input
from rlhf_core.types import Numbers

IDS = (7, 8, 8, 2**31 - 1)
FUNCTION = """
def score(samples):
    values = []
    for sample in samples:
        ids = sample.response_ids
        assert ids == tuple(ids) and ids[-1] == list(ids)[-1] and ids[1:] == tuple(ids)[1:]
        assert len(sample.prompt_ids + ids) == len(sample.prompt_ids) + len(ids) and ids[0] in ids
        assert type(ids[0]) is int and {ids: 1}[tuple(ids)] == 1
        values.append(sum(ids))
    return values
"""


def test_they_are_read_like_a_tuple() -> None:
    numbers = Numbers.of(IDS)
    assert numbers == IDS and numbers == Numbers.of(IDS) and hash(numbers) == hash(IDS)
    assert numbers != IDS[:3] and numbers != (1, 2, 3, 4) and numbers != list(IDS)
    assert (len(numbers), tuple(numbers), repr(numbers)) == (4, IDS, repr(IDS))
    assert (numbers[0], numbers[-1]) == (7, 2**31 - 1)
    assert tuple(numbers[1:3]) == (8, 8) and tuple(numbers[::-1]) == IDS[::-1] == tuple(reversed(numbers))
    assert (numbers.count(8), numbers.index(8), numbers.index(8, 2), 9 in numbers) == (2, 1, 2, False)
    assert (1, 2) + numbers == (1, 2, *IDS)  # noqa: RUF005
    assert numbers + (1,) == (*IDS, 1)  # noqa: RUF005
    assert numbers + Numbers.of([1]) == (*IDS, 1)
    assert all(type(number) is int for number in (*numbers, numbers[0]))
    with pytest.raises(IndexError):
        numbers[4]


def test_an_array_beside_them_is_as_beside_a_tuple() -> None:
    numbers: Any = Numbers.of(IDS)
    array = np.arange(4)
    assert (numbers + array).tolist() == (array + IDS).tolist()
    assert (numbers == array).tolist() == [False] * 4


def test_an_array_is_neither_copied_nor_written() -> None:
    array = np.array([0.5, -1.0], np.float32)
    numbers: Numbers[float] = Numbers(array)
    assert np.shares_memory(np.asarray(numbers), array)
    assert np.shares_memory(np.asarray(numbers[1:]), array)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(numbers)[0] = 1.0
    array[0] = 2.0
    assert numbers == (2.0, -1.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda numbers: pickle.loads(pickle.dumps(numbers))])
def test_a_copy_is_equal(copied: Any) -> None:
    assert copied(Numbers.of(IDS)) == IDS


def test_a_function_reads_tokens_like_a_tuple(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FUNCTION)
    samples = [reward_input("Q", "ab"), replace(reward_input("Q", ""), response_ids=(3,))]
    function = PythonFunction(PythonReward(type="python", file=str(file), function="m:score"))
    try:
        assert function(samples).values == [ord("a") + ord("b"), 3.0]
    finally:
        function.close()
