"""Locks: every public function and class of the mathematics has an example, and it gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

MODULES = ("advantages", "groups", "importance", "kl", "logprobs", "losses", "masking", "shaping")
RECORDS = {"AdvantageInputs", "LossInputs", "PolicyLoss", "ValueLoss"}
"""They hold what functions take and return, and are shown there."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"rlhf_core.algo.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name: str) -> None:
    module = importlib.import_module(f"rlhf_core.algo.{name}")
    own = {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (inspect.isfunction(value) or inspect.isclass(value))
        and not key.startswith("_")
    }
    assert not [
        key for key, value in own.items() if ">>>" not in (value.__doc__ or "") and key not in RECORDS
    ]
