"""The pages of `rlhf inspect`.

A page is HTML without scripts. Its address has the filter, the order and what is compared. Responses are
untrusted text: every value is escaped, and invisible characters are replaced (`evaluation.report`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from rlhf_core.errors import InputError
from rlhf_core.evaluation.report import environment
from rlhf_core.ops.inspect import queries
from rlhf_core.ops.inspect.phrases import n_grams, openings, risen
from rlhf_core.ops.inspect.rollouts import Filter, Key, Kind, Rollouts, Row, whole
from rlhf_core.ops.inspect.tokens import Measure, tokens_of

STYLE = files("rlhf_core.ops.inspect").joinpath("inspect.css").read_text(encoding="utf-8")
_PAGE = 50
_PARTING = 10
_SAMPLE = 1000
"""Responses of each group whose phrases are counted."""
_EDGE = 10
"""The first and the last of this many equal parts of the steps are compared."""
_FILTER = ("min:", "max:", "run", "prompt", "source", "excluded", "guard", "model", "text")
"""Begin the names of parameters of a filter."""
_ANSWERS = {"responses": "Answers", "scores": "One score against another"}
_ROLLOUTS = {"steps": "Steps", "responses": "Responses", "phrases": "Phrases", "scores": _ANSWERS["scores"]}
_PAIRS = {"pairs": "Both runs"}
_CHART = (300, 90)
"""Width and height."""


@dataclass(frozen=True)
class Pages:
    """Makes the pages of these rollouts."""

    rollouts: Rollouts
    root: str
    """Address that the pages of all kinds have in common."""
    kinds: Sequence[Kind] = ("ppo",)
    """All kinds that have pages."""

    @property
    def names(self) -> Mapping[str, str]:
        """The pages that a reader can choose, with their titles. The first one is shown first."""
        found = _ROLLOUTS if self.rollouts.kind == "ppo" else _ANSWERS
        return found | _PAIRS if found is _ROLLOUTS and len(self.rollouts.runs) > 1 else found

    def steps(self, query: Mapping[str, str]) -> str:
        """Return the curves and the table of steps."""
        chosen = self._filter(query)
        rows = queries.steps(self.rollouts, chosen)
        charts = {name: _chart(rows, name) for name in self.rollouts.numbers[1:]}
        return self._render("steps", query, rows=rows, charts=charts, chart_size=_CHART)

    def responses(self, query: Mapping[str, str]) -> str:
        """Return a page of the table of responses."""
        sort, descending, offset = self._order(query)
        count, rows = self.rollouts.page(
            self._filter(query), sort, descending=descending, offset=offset, limit=_PAGE
        )
        return self._render(
            "responses", query, rows=rows, count=count, sort=sort, descending=descending, offset=offset
        )

    def response(self, query: Mapping[str, str]) -> str:
        """Return one response with its tokens, or two next to each other."""
        keys = [_key(query.get(name, "")) for name in ("of", "beside") if name == "of" or query.get(name)]
        responses = self._opened(keys)
        return self._render("response", query, responses=responses, measures=_measures(responses))

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
        if len(self._scores) < 2:
            raise InputError("this page compares two columns of numbers; the record has one")
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
        sort, descending, offset = self._order(query)
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
        return self._render(
            "export",
            {},
            step=step,
            responses=responses,
            measures=_measures(responses),
            style=Markup(STYLE),
            digest=digest,
        )

    @property
    def _scores(self) -> list[str]:
        """Columns of scores, the first two of which are compared if none are chosen."""
        sources = self.rollouts.sources
        found = [name for name in self.rollouts.numbers[1:] if name not in sources]
        return [*sources, *found] if len(sources) > 1 else [*found, *sources]

    def _filter(self, query: Mapping[str, str]) -> Filter:
        return Filter.of(query, self.rollouts.numbers)

    def _column(self, name: str) -> str:
        if name not in self.rollouts.numbers:
            raise InputError(f"there is no column {name}; there are {', '.join(self.rollouts.numbers)}")
        return name

    def _order(self, query: Mapping[str, str]) -> tuple[str, bool, int]:
        """Return the column that a table is sorted by, whether the largest is first, and the first row."""
        of_ppo = self.rollouts.kind == "ppo"
        default = self.rollouts.numbers[of_ppo]  # the score, if there is one; or the answers to each prompt
        descending = query.get("order") != "up" and (of_ppo or "sort" in query)
        offset = whole("offset", query.get("offset") or "0")
        return self._column(query.get("sort") or default), descending, offset

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
            return f"{self.root}/{kind}/{to}?{urlencode(query_of_page)}"

        kind = self.rollouts.kind
        document = (
            _templates()
            .get_template(f"{page}.html.j2")
            .render(
                page=page,
                pages=self.names,
                kind=kind,
                kinds=self.kinds,
                query=query,
                rollouts=self.rollouts,
                runs=self.rollouts.runs,
                numbers=self.rollouts.numbers,
                bounded=[
                    name
                    for name in self.rollouts.numbers
                    if query.get(f"min:{name}") or query.get(f"max:{name}")
                ],
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
    templates.filters.update(value=_value, lowest=queries.lowest, column=_column)
    return templates


def _measures(responses: Sequence[Row]) -> list[Measure]:
    """Return what the tokens of any of these responses can be coloured by."""
    found = {measure.place: measure for one in responses for measure in one["tokens"].measures}
    return [found[place] for place in sorted(found)]


def _value(value: Any) -> str:
    """Return a value of a table, with a minus sign of the same width as a plus."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"
    return str(value)


def _column(name: str) -> Markup:
    """Return the name of a column, which can be broken after its parts."""
    return Markup(re.sub("([/_.])", r"\1<wbr>", str(escape(name))))


def _key(text: str) -> Key:
    """Return the key of a response, from its address RUN,STEP,INDEX."""
    parts = text.split(",")
    if len(parts) != 3:
        raise InputError(f"a response is RUN,STEP,INDEX; got {text[:40]}")
    return Key(*(whole("each of RUN,STEP,INDEX", part) for part in parts))


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
