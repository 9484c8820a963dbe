"""Section `drift`: how far new data may be from that of the champion."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Section, execution

Limit = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class DriftWarnings(Section):
    """A value above its limit is a warning; null: no limit. The first four are Jensen-Shannon divergences in
    bits.
    """

    lengths: Limit | None = execution(0.1, "Lengths of texts, in characters")
    sources: Limit | None = execution(0.1, "Shares of the sources, by their names")
    scripts: Limit | None = execution(0.1, "Scripts of letters, such as Latin or Cyrillic")
    vocabulary: Limit | None = execution(0.1, "Frequencies of words")
    duplicates: Limit | None = execution(0.1, "Increase of the share of rows that are duplicates")
    agreement: Limit | None = execution(
        0.1,
        "Accuracy of the champion's reward model on its own held-out pairs, minus its accuracy on the new"
        " ones: how much less it agrees with the new labels. The lower bound of its interval must be above"
        " the limit",
    )


class DriftStops(Section):
    """A value above its limit ends the run before the SFT model is trained; null: no limit. The measures are
    those of `drift.warn`.
    """

    lengths: Limit | None = execution(None, "Lengths of texts")
    sources: Limit | None = execution(None, "Shares of the sources")
    scripts: Limit | None = execution(None, "Scripts of letters")
    vocabulary: Limit | None = execution(None, "Frequencies of words")
    duplicates: Limit | None = execution(None, "Increase of the share of duplicates")
    agreement: Limit | None = execution(None, "Loss of accuracy of the champion's reward model")


class DriftConfig(Section):
    """The data compared with those of the champion, see [data](data.md#drift)."""

    warn: DriftWarnings = execution(DriftWarnings(), "Limits of warnings")
    stop: DriftStops = execution(DriftStops(), "Limits that end the run")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name in DriftWarnings.model_fields:
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
        return any(limit is not None for _, limit in self.stop)

    def limits(self, measure: str) -> tuple[float | None, float | None]:
        """Return the limits `warn` and `stop` of a measure."""
        warn: Any = getattr(self.warn, measure)
        stop: Any = getattr(self.stop, measure)
        return warn, stop
