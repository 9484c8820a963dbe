"""Types of arguments of the programs below `tests`."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return the number of `text`. Raises ArgumentTypeError if it is less than 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
