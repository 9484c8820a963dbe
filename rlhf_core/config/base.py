"""What all configuration sections share: frozen, no unknown keys, strict types, finite numbers."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""Decay of a moving average. With 1 the average would never change."""
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _at_home(path: str) -> str:
    scheme, bare = ("file://", path[7:]) if path.startswith("file://") else ("", path)
    return scheme + os.path.expanduser(bare)


UserPath = Annotated[str, AfterValidator(_at_home)]
"""A path as people write it: `~` is their home folder, as in a shell."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class Section(BaseModel):
    """A part of the configuration. Every field has a description: docs/configuration.md comes from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
