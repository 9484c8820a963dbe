"""Lengths of all rows in tokens: what the limits must be to keep them, and what the chosen limits leave out.

rows -> encoded without limits (up to `measured`) -> lengths -> `needed` -> `fitted_limits` -> rows within
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config.data import NEW, PROMPT, RESPONSE, SETS, TEXT, GivenLimits, Limits, SetName

log = logging.getLogger(__name__)

_FIELDS = (PROMPT, RESPONSE, TEXT)
_LEAST_MEASURED = 4096
"""Rows of up to this many tokens are encoded even if a limit is lower, because messages name their length."""
_MOST_MEASURED = 2**17
_SHOWN_SHARE = 0.01
"""From this share of the rows on, what a limit takes away is a warning."""
_OUTLIER = 2
"""A limit from the data keeps all rows of up to this multiple of the 99th percentile. A longer row would
decide alone how much memory each batch needs.
"""
LEAST = Limits(1, 1024, 1, 1)
"""What is needed for what no row has. Of responses, which PPO samples in any case, enough for a solution with
its steps, as in verl's example with GSM8K.
"""
_SHARES_WITH = {PROMPT: (RESPONSE, NEW), RESPONSE: (PROMPT,), TEXT: ()}
"""Limits that take room of the context from another one."""
_WHAT = {
    PROMPT: "a prompt longer than {limit} and are left out",
    RESPONSE: "a response longer than {limit} and are left out",
    TEXT: "a text or conversation longer than {limit} and are cut there, so their end is not learned",
}


def measured(given: GivenLimits, context: int) -> Limits:
    """Return the lengths up to which rows are encoded before the limits are known.

    A text is cut anyway, so of one that is too long only this is measured.
    """
    most = min(context, _MOST_MEASURED)
    return Limits(
        prompt=most if given.prompt is None else max(given.prompt, _LEAST_MEASURED),
        response=most if given.response is None else max(given.response, _LEAST_MEASURED),
        # One token more, so that a text that is cut there counts as longer than the limit, and one that
        # just fits does not.
        text=(most if given.text is None else min(given.text, context)) + 1,
        new=0,
    )


@dataclass
class Lengths:
    """Tokens of the rows of each set, by the field that limits them."""

    context: int
    """Context length of the model."""
    of: dict[str, dict[SetName, array[int]]] = field(
        default_factory=lambda: {name: {each: array("i") for each in SETS} for name in _FIELDS}
    )
    turns: array[int] = field(default_factory=lambda: array("i"))
    """The longest answer of each conversation. No limit of responses applies to it."""

    def add(self, name: SetName, lengths: Mapping[str, int]) -> None:
        """Add one row of the set `name`: its length for each field that limits it."""
        for limited_by, tokens in lengths.items():
            self.of[limited_by][name].append(tokens)

    def needed(self, given: GivenLimits, unmeasured: Limits = LEAST) -> Limits:
        """Return the limits with which the sets keep all rows, except for outliers, and those of `unmeasured`
        for what no row has.

        Without any response, those of the policy may be as long as the texts, or else as `given.new`.
        """
        # Each field has all sets, so `max` always has a value.
        prompt, response, text = (max(map(_needed, self.of[name].values())) for name in _FIELDS)
        response = max(response, _needed(self.turns))
        return Limits(
            prompt or unmeasured.prompt,
            response or text or given.new or unmeasured.response,
            text or unmeasured.text,
            new=0,
        )

    def table(self, given: GivenLimits, limits: Limits) -> list[dict[str, Any]]:
        """Return one row for each set and limit that applies to its rows, and one for the responses that are
        sampled, for the data card.
        """
        rows: list[dict[str, Any]] = []
        needed = self.needed(given)
        # Not strict: `Limits.new`, the last one, limits no rows.
        for name, limit in zip(_FIELDS, limits, strict=False):
            for set_name, lengths in self.of[name].items():
                ordered = sorted(lengths)
                if not ordered:
                    continue
                measured_lengths = {
                    "rows": len(ordered),
                    "p50": _percentile(ordered, 50),
                    "p99": _percentile(ordered, 99),
                    "longest": ordered[-1],
                }
                source = self._source(name, given, limits, needed)
                longer = sum(tokens > limit for tokens in ordered)
                rows.append(
                    {"set": set_name, "field": name, **measured_lengths, "tokens": limit}
                    | {"from": source, "longer": longer}
                )
        unmeasured = dict.fromkeys(("rows", "p50", "p99", "longest"))
        source = NEW if given.new is not None else self._source(RESPONSE, given, limits, needed)
        rows.append(
            {"set": "sampled", "field": NEW, **unmeasured, "tokens": limits.new}
            | {"from": source, "longer": None}
        )
        return rows

    def _source(self, name: str, given: GivenLimits, limits: Limits, needed: Limits) -> str:
        """Return what decides about the limit `name`: its field, the context, the data or the default."""
        index = _FIELDS.index(name)
        if given[index] is not None:
            return name
        if limits[index] < needed[index]:
            return "the context"
        has_rows = [any(self.of[each].values()) for each in (name, TEXT)]
        return "the data" if any(has_rows) else "the default"

    def say(self, given: GivenLimits, limits: Limits) -> None:
        """Log what each limit takes away: a warning from 1 % of the rows of a set on."""
        for name, limit in zip(_FIELDS, limits, strict=False):
            longer = {}
            for set_name, lengths in self.of[name].items():
                if number := sum(tokens > limit for tokens in lengths):
                    longer[set_name] = number
            sets = list(longer)
            if not sets:
                continue
            shares = {set_name: longer[set_name] / len(self.of[name][set_name]) for set_name in sets}
            parts = []
            for each, share in shares.items():
                rows = len(self.of[name][each])
                parts.append(f"{longer[each]} of {rows} rows of data.{each} ({share:.1%})")
            log.log(
                logging.WARNING if max(shares.values()) >= _SHOWN_SHARE else logging.INFO,
                "%s have %s; %s",
                ", ".join(parts),
                _WHAT[name].format(limit=f"{name}={limit}"),
                self.why(name, sets, given, limits),
            )

    def why(self, name: str, sets: Sequence[SetName], given: GivenLimits, limits: Limits) -> str:
        """Return why the limit `name` leaves rows of sets out, and what to change."""
        of_field = dict(zip((*_FIELDS, NEW), given, strict=True))
        limit = dict(zip(_FIELDS, limits, strict=False))[name]
        if of_field[name] is not None:
            # 2**31 stands for a model without a limit of its own, as in `prepare` and `check`.
            context = f"; the model's context is {self.context}" if self.context < 2**31 else ""
            return f"raise it: {self._needed_for(name, sets)}{context}"
        if self._source(name, given, limits, self.needed(given)) == "the context":
            reason = f"the model's context of {self.context} tokens leaves no more"
            fix = "use a model with a longer one"
            for other in _SHARES_WITH[name]:
                taken = of_field[other]
                if taken is not None and taken >= self.context - limit:
                    reason += f" beside {other}={taken}"
                    fix = f"lower {other}"
                    break
            reason = f"{reason}; {fix}"
        else:
            reason = "the longest rows are outliers; set the field to keep them"
        return f"{reason}: {self._needed_for(name, sets)}"

    def _needed_for(self, name: str, sets: Sequence[SetName]) -> str:
        """Return the values of the limit `name` that keep the rows of the sets."""
        lengths = [sorted(self.of[name][each]) for each in sets]
        most = max(_percentile(each, 99) for each in lengths)
        return f"{most} keeps 99 % of the rows, {max(each[-1] for each in lengths)} all"


def _needed(lengths: Sequence[int]) -> int:
    if not lengths:
        return 0
    ordered = sorted(lengths)
    return min(ordered[-1], _OUTLIER * _percentile(ordered, 99))


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest length that is enough for `percent` of the rows."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
