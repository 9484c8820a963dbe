"""Section `drift`: how far new data may be from that of the champion."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from rlhf_core.config.base import Section, execution

Measure = Literal["lengths", "sources", "vocabulary", "agreement"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
Limit = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
DEFAULT_WARNING = 0.1


class DriftConfig(Section):
    """The data compared with those of the champion. [Data](data.md#drift) describes the measures."""

    warn: dict[Measure, Limit | None] = execution(
        {},
        "A measure above its limit is a warning; null: no limit. A measure that is left out has the limit"
        f" {DEFAULT_WARNING:g}",
    )
    stop: dict[Measure, Limit | None] = execution(
        {},
        "A measure above its limit ends the run before the SFT model is trained; null, or left out: no limit",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name in MEASURES:
            warn, stop = self.limits(name)
            if warn is not None and stop is not None and warn > stop:
                raise ValueError(
                    f"drift.warn.{name} must be at most drift.stop.{name} ({stop:g}); got {warn:g}; lower it,"
                    " or set it to null"
                )
        return self

    @property
    def can_stop(self) -> bool:
        """Whether any measure has a limit that ends the run."""
        return any(limit is not None for limit in self.stop.values())

    def limits(self, measure: Measure) -> tuple[float | None, float | None]:
        """Return the limits `warn` and `stop` of a measure."""
        return self.warn.get(measure, DEFAULT_WARNING), self.stop.get(measure)
