"""Types of arguments of the programs below `tests`."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return the number of `text`. Raises ArgumentTypeError if it is not a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return number
