"""The pages of `rlhf inspect`.

A page is HTML without scripts. Its address has the filter, the order and what is compared. Responses are
untrusted text: every value is escaped, and invisible characters are replaced (`evaluation.report`).
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rlhf_core.errors import InputError
from rlhf_core.evaluation.report import environment
from rlhf_core.ops.inspect import queries
from rlhf_core.ops.inspect.phrases import n_grams, openings, risen
from rlhf_core.ops.inspect.rollouts import Filter, Key, Rollouts, Row
from rlhf_core.ops.inspect.tokens import LEVELS, tokens_of

STYLE = files("rlhf_core.ops.inspect").joinpath("inspect.css").read_text(encoding="utf-8")
_PAGE = 50
_PARTING = 10
_SAMPLE = 1000
"""Responses of each group whose phrases are counted."""
_EDGE = 10
"""The first and the last of this many equal parts of the steps are compared."""
_FILTER = ("min:", "max:", "run", "prompt", "excluded", "text")
"""Begin the names of parameters of a filter."""
_CHART = (300, 90)
"""Width and height."""


@dataclass(frozen=True)
class Pages:
    """Makes the pages of these rollouts. `root` is the address that all pages have in common."""

    rollouts: Rollouts
    root: str

    def steps(self, query: Mapping[str, str]) -> str:
        """Return the curves and the table of steps."""
        chosen = self._filter(query)
        rows = queries.steps(self.rollouts, chosen)
        charts = {name: _chart(rows, name) for name in self.rollouts.numbers[1:]}
        return self._render("steps", query, rows=rows, charts=charts, chart_size=_CHART)

    def responses(self, query: Mapping[str, str]) -> str:
        """Return a page of the table of responses."""
        sort, descending, offset = self._order(query, "score")
        count, rows = self.rollouts.page(
            self._filter(query), sort, descending=descending, offset=offset, limit=_PAGE
        )
        return self._render(
            "responses", query, rows=rows, count=count, sort=sort, descending=descending, offset=offset
        )

    def response(self, query: Mapping[str, str]) -> str:
        """Return one response with its tokens, or two next to each other."""
        keys = [_key(query[name]) for name in ("of", "beside") if name in query]
        return self._render("response", query, responses=self._opened(keys))

    def phrases(self, query: Mapping[str, str]) -> str:
        """Return the phrases that became more frequent.

        Without a filter, the last tenth of the steps is compared with the first; with one, its responses.
        """
        rollouts = self.rollouts
        width = max(1, (rollouts.last_step - rollouts.first_step + 1) // _EDGE)
        chosen = self._filter(query)
        if chosen == Filter(run=chosen.run):
            chosen = Filter({"step": (rollouts.last_step - width + 1, None)}, chosen.run)
        early = Filter({"step": (None, rollouts.first_step + width - 1)}, chosen.run)
        before, after = (queries.sample(rollouts, one, _SAMPLE) for one in (early, chosen))
        scores = rollouts.sources
        found = {
            title: risen(before, after, scores, phrases_of)
            for title, phrases_of in (("Openings", openings), ("Phrases", n_grams))
        }
        return self._render(
            "phrases", query, found=found, before=before, after=after, scores=scores, early=early, late=chosen
        )

    def scores(self, query: Mapping[str, str]) -> str:
        """Return one score against another."""
        x, y = (
            self._column(query.get(axis) or default)
            for axis, default in zip("xy", self._scores[:2], strict=True)
        )
        chosen = self._filter(query)
        grid = queries.grid(self.rollouts, chosen, x, y)
        correlation, above, below = queries.parting(self.rollouts, chosen, x, y, _PARTING)
        groups = ((x, y, above), (y, x, below))
        return self._render("scores", query, x=x, y=y, grid=grid, correlation=correlation, groups=groups)

    def pairs(self, query: Mapping[str, str]) -> str:
        """Return the last responses of both runs to the same prompts."""
        if len(self.rollouts.runs) < 2:
            raise InputError("this page compares two runs; give both to rlhf inspect")
        sort, descending, offset = self._order(query, "score")
        count, rows = queries.pairs(
            self.rollouts, self._filter(query), sort, descending=descending, offset=offset, limit=_PAGE
        )
        return self._render(
            "pairs", query, rows=rows, count=count, sort=sort, descending=descending, offset=offset
        )

    def problem(self, message: str) -> str:
        """Return a page with an error."""
        return self._render("problem", {}, message=message)

    def export(self, step: int) -> str:
        """Return one step as a document that needs no server."""
        _, rows = self.rollouts.page(
            Filter({"step": (step, step)}), "score", descending=True, offset=0, limit=self.rollouts.count
        )
        if not rows:
            raise InputError(
                f"--step: step {step} has no recorded responses; got {step}; the record has steps"
                f" {self.rollouts.first_step} to {self.rollouts.last_step}"
            )
        digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
        responses = self._opened([Key(row["run"], row["step"], row["index"]) for row in rows])
        return self._render("export", {}, step=step, responses=responses, style=Markup(STYLE), digest=digest)

    @property
    def _scores(self) -> list[str]:
        """Columns of scores, the first two of which are compared if none are chosen."""
        sources = self.rollouts.sources
        found = [name for name in self.rollouts.numbers if name != "step" and name not in sources]
        return [*sources, *found] if len(sources) > 1 else [*found, *sources]

    def _filter(self, query: Mapping[str, str]) -> Filter:
        return Filter.of(query, self.rollouts.numbers)

    def _column(self, name: str) -> str:
        if name not in self.rollouts.numbers:
            raise InputError(f"there is no column {name}; there are {', '.join(self.rollouts.numbers)}")
        return name

    def _order(self, query: Mapping[str, str], default: str) -> tuple[str, bool, int]:
        """Return the column that a table is sorted by, whether the largest is first, and the first row."""
        offset = query.get("offset", "0")
        if not offset.isdecimal():
            raise InputError(f"offset must be a number; got {offset}")
        return self._column(query.get("sort") or default), query.get("order") != "up", int(offset)

    def _opened(self, keys: Sequence[Key]) -> list[Row]:
        """Return responses with their texts and tokens."""
        found = self.rollouts.tokens(key for key in keys if key.run < len(self.rollouts.runs))
        responses = []
        for key in keys:
            if key not in found:
                raise InputError(f"there is no response {key.index} of step {key.step}")
            row = found[key] | {"run": key.run}
            [prompt] = self.rollouts.decode(key.run, [row["prompt_ids"]])
            fields = {name: value for name, value in row.items() if not isinstance(value, list)}
            tokens = tokens_of(row, self.rollouts.tokenizers[key.run])
            responses.append({"key": key, "prompt": prompt, "fields": fields, "tokens": tokens})
        return responses

    def _render(self, page: str, query: Mapping[str, str], **values: Any) -> str:
        def link(to: str, changes: Mapping[str, Any] | None = None) -> str:
            """Return the address of a page with the filter of this one. Changes to None or "" remove."""
            kept = {
                name: value
                for name, value in query.items()
                if name.startswith(_FILTER) or (to == page and name in ("sort", "order", "x", "y"))
            }
            changed = {**kept, **(changes or {})}
            query_of_page = {name: value for name, value in changed.items() if value not in (None, "")}
            return f"{self.root}/{to}?{urlencode(query_of_page)}"

        document = (
            _templates()
            .get_template(f"{page}.html.j2")
            .render(
                page=page,
                query=query,
                rollouts=self.rollouts,
                runs=self.rollouts.runs,
                numbers=self.rollouts.numbers,
                levels=range(1, LEVELS + 1),
                page_size=_PAGE,
                root=self.root,
                link=link,
                **values,
            )
        )
        return document.strip() + "\n"


@cache
def _templates() -> Environment:
    templates = environment().overlay(loader=PackageLoader("rlhf_core.ops.inspect", package_path=""))
    templates.filters["value"] = _value
    return templates


def _value(value: Any) -> str:
    """Return a value of a table, with a minus sign of the same width as a plus."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"
    return str(value)


def _key(text: str) -> Key:
    """Return the key of a response, from its address RUN,STEP,INDEX."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise InputError(f"a response is RUN,STEP,INDEX; got {text}")
    return Key(*map(int, parts))


@dataclass(frozen=True)
class Chart:
    """The means of one column by step, as lines in an image of the size `_CHART`."""

    low: float
    high: float
    lines: dict[int, str]
    """Points of a polyline by run."""
    readings: list[tuple[float, float, str]]
    """Left border, width and text of each place of the x axis."""


def _chart(rows: Sequence[Row], name: str) -> Chart | None:
    """Return the chart of a column. None: it has no values."""
    points = [(row["run"], row["bin"], row[name]) for row in rows if row[name] is not None]
    if not points:
        return None
    low, high = min(value for *_, value in points), max(value for *_, value in points)
    first, last = min(place for _, place, _ in points), max(place for _, place, _ in points)
    width, height = _CHART
    part = width / (last - first + 1)
    lines: dict[int, list[str]] = defaultdict(list)
    texts: dict[int, list[str]] = defaultdict(list)
    for run, place, value in points:
        x = (place - first + 0.5) * part
        y = height * (0.95 - 0.9 * (value - low) / ((high - low) or 1))
        lines[run].append(f"{x:.1f},{y:.1f}")
        texts[place].append(_value(value))
    steps = {row["bin"]: _steps(row) for row in rows}
    readings = [
        ((place - first) * part, part, f"{steps[place]}: {', '.join(values)}")
        for place, values in texts.items()
    ]
    return Chart(low, high, {run: " ".join(places) for run, places in lines.items()}, readings)


def _steps(row: Row) -> str:
    if row["first"] == row["last"]:
        return f"step {row['first']}"
    return f"steps {row['first']} to {row['last']}"
