"""Locks: the examples in the docstrings of `rlhf_core.algo` give the results that they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("losses",)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"rlhf_core.algo.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
