"""`override`: a type checker reports a method of a fake that its interface no longer has."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import override
else:
    # Part of `typing` from Python 3.12 on. At run time it has no effect.
    def override(method: T) -> T:
        return method


__all__ = ["override"]
