"""The pages of `rlhf inspect`.

A page is HTML without scripts. Its address has the filter, the order and what is compared. Responses are
untrusted text: every value is escaped, and invisible characters are replaced (`evaluation.report`).
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate, chain, islice
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from tokenizers.decoders import DecodeStream

from rlhf_core.config.redact import without_secret_values
from rlhf_core.errors import InputError
from rlhf_core.evaluation.report import INVISIBLE, environment
from rlhf_core.ops.finished_run import Kind
from rlhf_core.ops.inspect import queries
from rlhf_core.ops.inspect.rollouts import Filter, Key, Rollouts, Row, bounded, whole

STYLE = files("rlhf_core.ops.inspect").joinpath("inspect.css").read_text(encoding="utf-8")
_PAGE = 50
_PARTING = 10
_SAMPLE = 1000
"""Responses of each group whose phrases are counted."""
_LONGEST_NOTE = 2000
"""Characters of a note, as in the form."""
_EDGE = 10
"""The first and the last of this many equal parts of the steps are compared."""
_FILTER = ("min:", "max:", "run", "prompt", "source", "excluded", "guard", "model", "label", "person", "text")
"""Begin the names of parameters of a filter."""
_ANSWERS = {"responses": "Answers", "scores": "One score against another"}
_ROLLOUTS = {"steps": "Steps", "responses": "Responses", "phrases": "Phrases", "scores": _ANSWERS["scores"]}
_PAIRS = {"pairs": "Both runs"}
_CHART = (300, 90)
"""Width and height."""
_LONGEST = 5
"""Words of the longest phrases."""
_SHOWN = 60
"""Phrases on a page."""
_SAME = 0.02
"""Difference of two shares that hides a phrase within a longer one."""
_LEAST_RISE = 0.01
_LARGE_LOGPROB, _LARGE_KL = 6.0, 3.0
"""Nats that have the strongest colour."""
MEASURES = ("log-probability", "KL", "advantage", "value")
"""Names of all measures. A response may lack some of them."""
LEVELS = 4
"""Strength of the strongest colour."""


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
        return self._table("responses", query)

    def response(self, query: Mapping[str, str]) -> str:
        """Return one response with its tokens, or two next to each other. `by` of the query is who labels."""
        keys = [_key(query.get(name, "")) for name in ("of", "beside") if name == "of" or query.get(name)]
        responses = self._opened(keys)
        near = self._near(keys[0], query) if query.get("at") else None
        return self._render("response", query, responses=responses, measures=_measures(responses), near=near)

    def label(self, form: Mapping[str, str]) -> str:
        """Keep the label and the note of a form, and return who gave them. Raises InputError as
        `Rollouts.label`.
        """
        # The form shows invisible characters as others, and would send those back.
        texts = [INVISIBLE.sub("", form.get(name, "")).strip() for name in ("by", "label", "note")]
        by, label, note = (text[:_LONGEST_NOTE] for text in texts)
        # DuckDB has one column for two names that differ in case only.
        by = by.lower()
        self.rollouts.label(_key(form.get("response", "")), by, label, note)
        return by

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
            "Openings": risen(before, after, scores, openings),
            "Phrases": risen(before, after, scores, n_grams),
        }
        return self._render(
            "phrases", query, found=found, before=before, after=after, scores=scores, early=early, late=chosen
        )

    def scores(self, query: Mapping[str, str]) -> str:
        """Return one score against another."""
        if len(self._scores) < 2:
            raise InputError("this page compares two columns of numbers; the record has one")
        first, second, *_ = self._scores
        x, y = self._column(query.get("x") or first), self._column(query.get("y") or second)
        chosen = self._filter(query)
        grid = queries.grid(self.rollouts, chosen, x, y)
        correlation, above, below = queries.parting(self.rollouts, chosen, x, y, _PARTING)
        groups = ((x, y, above), (y, x, below))
        return self._render("scores", query, x=x, y=y, grid=grid, correlation=correlation, groups=groups)

    def pairs(self, query: Mapping[str, str]) -> str:
        """Return the last responses of both runs to the same prompts."""
        return self._table("pairs", query)

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
            # Not escaped, because the digest is that of the text as it is.
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

    def _table(self, page: str, query: Mapping[str, str]) -> str:
        offset = whole("offset", query.get("offset") or "0")
        return self._render(page, query, offset=offset, **self._listed(page, query, offset, _PAGE))

    def _listed(self, page: str, query: Mapping[str, str], offset: int, limit: int) -> dict[str, Any]:
        """Return the order of the table of a page, how many rows it has, and some of them."""
        of_ppo = self.rollouts.kind == "ppo"
        default = self.rollouts.numbers[of_ppo]  # the score, if there is one; or the answers to each prompt
        sort = self._column(query.get("sort") or default)
        descending = query.get("order") != "up" and (of_ppo or "sort" in query)
        rows_of = queries.pairs if page == "pairs" else Rollouts.page
        chosen = self._filter(query)
        count, rows = rows_of(self.rollouts, chosen, sort, descending=descending, offset=offset, limit=limit)
        return {"sort": sort, "descending": descending, "count": count, "rows": rows}

    def _near(self, key: Key, query: Mapping[str, str]) -> dict[str, Any]:
        """Return where a response, or the first one of a pair, is in the table that it was opened from, and
        the rows before and after it with their places.
        """
        page, at = "pairs" if query.get("beside") else "responses", whole("at", query["at"])
        start = max(0, at - 1)
        table, others = self._listed(page, query, start, 3), []
        for place, row in enumerate(table["rows"], start):
            one = row.get("one", row)
            # A label can have taken the response out of the table: then the next one is in its place.
            if Key(one["run"], one["step"], one["index"]) != key:
                others.append((place, row))
        return {"page": page, "at": at, "count": table["count"], "others": others}

    def _opened(self, keys: Sequence[Key]) -> list[Row]:
        """Return responses with their texts and tokens."""
        found = self.rollouts.tokens(keys)
        responses = []
        for key in keys:
            if key not in found:
                raise InputError(f"there is no response {key.index} of step {key.step}")
            row = found[key] | {"run": key.run}
            [prompt] = self.rollouts.decode(key.run, [row["prompt_ids"]])
            fields = {name: value for name, value in row.items() if not isinstance(value, list)}
            tokens = tokens_of(row, self.rollouts.tokenizers[key.run])
            responses.append(row | {"key": key, "prompt": prompt, "fields": fields, "tokens": tokens})
        return responses

    def _render(self, page: str, query: Mapping[str, str], **values: Any) -> str:
        def link(to: str, changes: Mapping[str, Any] | None = None) -> str:
            """Return the address of a page with the filter of this one. Changes to None or "" remove."""
            # A response has those of the table that it was opened from.
            of_page = ("sort", "order", "x", "y") if to == page or "response" in (to, page) else ()
            kept = [name for name in query if name.startswith(_FILTER) or name in of_page]
            changed = {**{name: query[name] for name in kept}, **(changes or {})}
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
                bounded=bounded(query, self.rollouts.numbers),
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
    # An overlay shares the filters of the report, which has another `column`.
    own = {"value": _value, "lowest": queries.lowest, "column": _column}
    templates.filters = {**templates.filters, **own}
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
    readings = []
    for place, values in texts.items():
        readings.append(((place - first) * part, part, f"{steps[place]}: {', '.join(values)}"))
    return Chart(low, high, {run: " ".join(places) for run, places in lines.items()}, readings)


def _steps(row: Row) -> str:
    if row["first"] == row["last"]:
        return f"step {row['first']}"
    return f"steps {row['first']} to {row['last']}"


@dataclass(frozen=True)
class Phrase:
    """A phrase that became more frequent."""

    text: str
    before: float
    """Share of the responses before with the phrase."""
    after: float
    """Share of the responses after."""
    times: float
    """Mean number in a response after that has it."""
    differences: Mapping[str, float | None]
    """Mean with the phrase minus mean without it in the same step, by score; None if no step
    has both.
    """

    @property
    def rise(self) -> float:
        return self.after - self.before


def n_grams(words: Sequence[str]) -> Iterator[str]:
    """Yield all sequences of one to five words, as often as they occur."""
    for size in range(1, _LONGEST + 1):
        for start in range(len(words) - size + 1):
            yield " ".join(words[start : start + size])


def openings(words: Sequence[str]) -> Iterator[str]:
    """Yield the first one to five words."""
    for size in range(1, min(_LONGEST, len(words)) + 1):
        yield " ".join(words[:size])


def risen(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    scores: Sequence[str],
    phrases_of: Callable[[Sequence[str]], Iterator[str]],
) -> list[Phrase]:
    """Return the phrases whose share rose most, the largest rise first.

    Args:
        before: Responses: rows with `text`, `step` and the scores.
        after: The responses that are compared with them.
        scores: Names of scores, of which a row may have none (None).
        phrases_of: Yields the phrases of the words of a response.
    """
    rows = [*before, *after]
    found = [Counter(phrases_of(row["text"].split())) for row in rows]
    of_before, of_after = _shares(found[: len(before)]), _shares(found[len(before) :])
    rises = {phrase: share - of_before.get(phrase, 0.0) for phrase, share in of_after.items()}
    rising = sorted(
        (phrase for phrase, rise in rises.items() if rise >= _LEAST_RISE),
        key=lambda phrase: (-rises[phrase], -len(phrase), phrase),
    )
    chosen = (phrase for phrase in rising if not _is_within_longer(phrase, rising, rises))
    results = []
    for phrase in islice(chosen, _SHOWN):
        holders = {number for number, counts in enumerate(found) if phrase in counts}
        times = [found[number][phrase] for number in holders if number >= len(before)]
        differences = {name: _difference(rows, holders, name) for name in scores}
        shares = of_before.get(phrase, 0.0), of_after[phrase]
        results.append(Phrase(phrase, *shares, statistics.fmean(times), differences))
    return results


def _shares(found: Sequence[Counter[str]]) -> dict[str, float]:
    """Return the share of the responses with each phrase."""
    holders = Counter(chain.from_iterable(found))
    return {phrase: count / len(found) for phrase, count in holders.items()}


def _is_within_longer(phrase: str, rising: Sequence[str], rises: Mapping[str, float]) -> bool:
    """Return whether a longer phrase contains this one and rose almost as much."""
    inner = f" {phrase} "
    for other in rising:
        # `rising` is sorted by rise: none of those that follow rose enough.
        if rises[other] < rises[phrase] - _SAME:
            return False
        if len(other) > len(phrase) and inner in f" {other} ":
            return True
    return False


def _difference(rows: Sequence[Mapping[str, Any]], holders: set[int], name: str) -> float | None:
    # Within steps: over all of them, each phrase of late steps would have what the policy gained until then.
    steps: dict[int, tuple[list[float], list[float]]] = {}
    for number, row in enumerate(rows):
        if row[name] is not None:
            steps.setdefault(row["step"], ([], []))[number not in holders].append(row[name])
    differences, weights = [], []
    for having, lacking in steps.values():
        if having and lacking:
            differences.append(statistics.fmean(having) - statistics.fmean(lacking))
            # The inverse of the variance of this difference, if that of the values is the same in all steps.
            weights.append(len(having) * len(lacking) / (len(having) + len(lacking)))
    return statistics.fmean(differences, weights) if weights else None


@dataclass(frozen=True)
class Measure:
    """What the tokens of a response can be coloured by."""

    name: str
    meaning: str
    values: list[float]
    """(T,) of the tokens."""
    levels: list[int]
    """(T,) colours: from -LEVELS to LEVELS, 0 is none."""

    @property
    def place(self) -> int:
        """Number of its colours in the style, the same for all responses of a page."""
        return MEASURES.index(self.name)


@dataclass(frozen=True)
class Tokens:
    """A response as tokens."""

    pieces: list[str]
    """(T,) texts. That of a character with several tokens is at the last of them; the others are empty."""
    measures: list[Measure]

    def rows(self) -> list[tuple[str, list[tuple[int, float]]]]:
        """Return for each token its text, and a colour and a value of each measure."""
        columns = [list(zip(one.levels, one.values, strict=True)) for one in self.measures]
        return [(piece, list(values)) for piece, *values in zip(self.pieces, *columns, strict=True)]


def tokens_of(row: Mapping[str, Any], tokenizer: Any) -> Tokens:
    """Return the tokens of a response, from its row of the record and the tokenizer of its policy."""
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer, token) or "" for token in row["response_ids"]]
    # A secret has several tokens.
    [shown] = without_secret_values(["".join(pieces)], same_length=True)
    ends = accumulate(map(len, pieces))
    pieces = [shown[end - len(piece) : end] for piece, end in zip(pieces, ends, strict=True)]
    measures = []
    old, ref = row.get("old_logprobs"), row.get("ref_logprobs")
    if (logprobs := old or row.get("rollout_logprobs")) is not None:
        by = "the policy before the update" if old else "the engine"
        meaning = f"by {by}, in nats; the stronger, the less probable"
        measures.append(_measure("log-probability", meaning, logprobs, _LARGE_LOGPROB))
    if old and ref:
        kl = [a - b for a, b in zip(old, ref, strict=True)]
        meaning = "more (orange) or less (blue) probable than by the reference, in nats"
        measures.append(_measure("KL", meaning, kl, _LARGE_KL))
    for name, column in (("advantage", "advantages"), ("value", "values")):
        if values := row.get(column):
            meaning = "above (orange) or below (blue) 0; the strongest is the largest of this response"
            measures.append(_measure(name, meaning, values, max(map(abs, values))))
    return Tokens(pieces, measures)


def _measure(name: str, meaning: str, values: Sequence[float], large: float) -> Measure:
    return Measure(name, meaning, list(values), [_level(value, large) for value in values])


def _level(value: float, large: float) -> int:
    """Return the colour of a value. A quarter of `large` has half of the strongest colour."""
    if not large or math.isnan(value):
        return 0
    share = min(1.0, abs(value) / large)
    return round(math.copysign(LEVELS * math.sqrt(share), value))
