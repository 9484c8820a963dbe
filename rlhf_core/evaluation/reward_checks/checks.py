"""The table of checks. A check returns evidence, the response that shows the problem, or None.

A source *reads the rows* if a right response gets more than one that is right for another row. It *accepts* a
response whose value is that of a right one (`View.accepts`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rlhf_core.config.redact import shown
from rlhf_core.config.rewards import LanguageModelReward, ModelReward
from rlhf_core.data.answers import same_answer
from rlhf_core.evaluation.reward_checks.bench import TOTAL, Finding, Item, NotMeasured, View
from rlhf_core.evaluation.reward_checks.material import FILLER, JUNK, SCRIPTS
from rlhf_core.evaluation.statistics import wilson

_CHANGE = 0.25
"""A change of this share of the scale counts."""
_SAME = 0.05
_LOOP = 240
"""Characters of a loop."""
_REPEATED = 64
_ALONE = 12
_CLIMBED = 8
_CANDIDATES = 64
_ROUNDS = 4
_KEPT = 4
_CORRELATION = 0.8
_PAIRS = 20


@dataclass(frozen=True)
class Check:
    """A row of the table."""

    name: str
    looks_for: str
    of: str
    """`source`, `total` or `both`."""
    evidence: Callable[[View], str | None]

    def applies(self, view: View) -> bool:
        """Return whether it is made for this view."""
        return self.of == "both" or (self.of == TOTAL) == (view.subject is None)

    def run(self, view: View) -> Finding:
        """Return its result."""
        called = view.bench.subjects if view.subject is None else [view.subject]
        if any(subject.has_hung for subject in called) and self not in FAILURES:
            return Finding(self.name, view.name, "not measured", "it gave no answer in time")
        try:
            evidence = self.evidence(view)
        except NotMeasured as reason:
            return Finding(self.name, view.name, "not measured", str(reason))
        return Finding(self.name, view.name, "finding" if evidence else "passes", evidence or "")


def _shown(says: str, prompt: str, response: str) -> str:
    return f"{says}: response {shown(response, limit=160)} to {shown(prompt, limit=80)}"


def _case(view: View, row: int, text: str, says: str) -> str:
    return _shown(says, view.rows[row].prompt.prompt, text)


def _first(
    view: View, texts: Mapping[int, str], is_bad: Callable[[int, float], bool], says: str, least: float
) -> str | None:
    """Return the evidence of the first bad text, if more than a share `least` of them are bad."""
    values = view.texts(texts)
    bad = [row for row, value in values.items() if is_bad(row, value)]
    if not bad or len(bad) <= least * len(texts):
        return None
    row = bad[0]
    says = f"{says} ({len(bad)} of {len(texts)} prompts), value {values[row]:.3g}"
    return _case(view, row, texts[row], says)


# -- failures --


def _failure(pattern: str) -> Callable[[View], str | None]:
    def evidence(view: View) -> str | None:
        assert view.subject is not None
        for sample, reason in view.subject.failures:
            if _KINDS[next(kind for kind in _KINDS if re.search(kind, reason))] == pattern:
                return _shown(reason, sample.prompt, sample.response)
        return None

    return evidence


_KINDS = {
    "no answer within": "hang",
    "rewards must be finite": "finite",
    r"values for \d+ responses|scores for \d+ items": "count",
    "": "crash",
}
"""What the reason of a failure says."""


# -- calls --


def _calls(view: View) -> list[Item]:
    """Return texts that are scored several times."""
    some = view.some[: 4 if view.subject and view.subject.is_asked else _REPEATED // 3]
    texts = [
        (i, text, True) for i in some for text in (view.best[i], view.wrong.get(i, ""), view.best[i][:20])
    ]
    return texts[:_REPEATED]


def _again(view: View, items: Sequence[Item]) -> list[float]:
    assert view.subject is not None
    return view.subject([view.bench.sample(item) for item in items])


def _difference(
    view: View, items: Sequence[Item], one: Sequence[float], two: Sequence[float], says: str
) -> str | None:
    for item, first, second in zip(items, one, two, strict=True):
        if not (first == second or math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-6)):
            if math.isnan(first) or math.isnan(second):
                continue
            return _case(view, item[0], item[1], f"{first:.4g}, and {second:.4g} {says}")
    return None


def _repeatable(view: View) -> str | None:
    items = _calls(view)
    return _difference(view, items, _again(view, items), _again(view, items), "in the next call")


def _order(view: View) -> str | None:
    if _repeatable(view):
        raise NotMeasured("its values differ from call to call")
    items = _calls(view)
    backwards = _again(view, items[::-1])[::-1]
    return _difference(view, items, _again(view, items), backwards, "in a batch in reversed order")


def _batch(view: View) -> str | None:
    if view.subject is not None and view.subject.is_grouped:
        raise NotMeasured("needs_group: its values depend on the group")
    if _repeatable(view):
        raise NotMeasured("its values differ from call to call")
    items = _calls(view)
    alone = [_again(view, [item])[0] for item in items[:_ALONE]]
    together = _again(view, items)[: len(alone)]
    return _difference(view, items[: len(alone)], together, alone, "alone instead of in a batch")


# -- values --


def _constant(view: View) -> str | None:
    items = [
        (i, text, True) for i in view.some[:8] for text in (view.best[i], view.wrong.get(i, "a"), *JUNK[:8])
    ]
    values = {value for value in view.values(items) if not math.isnan(value)}
    values |= {
        value for value in (*view.best_values.values(), *view.wrong_values.values()) if not math.isnan(value)
    }
    if len(values) > 1 or not items:
        return None
    return _case(
        view, items[0][0], items[0][1], f"all texts get {next(iter(values), math.nan):g}, also right ones"
    )


def _clip(view: View) -> str | None:
    if view.subject is None or not isinstance(view.subject.source, ModelReward):
        raise NotMeasured("only the scores of the reward model are clipped")
    clip = view.bench.score_clip or math.inf
    beyond = [i for i, value in view.best_values.items() if abs(value) >= clip]
    if len(beyond) <= 0.1 * len(view.best_values):
        return None
    return _case(
        view, beyond[0], view.best[beyond[0]], f"{len(beyond)} good responses are beyond score_clip={clip:g}"
    )


def _whitespace(view: View) -> str | None:
    def changed(row: int, value: float) -> bool:
        return abs(value - view.best_values[row]) > _CHANGE * view.scale

    for name, before, after in (
        ("a line feed after it", "", "\n"),
        ("a blank after it", "", " "),
        ("a line feed before it", "\n", ""),
    ):
        texts = {i: f"{before}{view.best[i]}{after}" for i in view.some}
        if found := _first(view, texts, changed, f"{name} changes the value", 0.5):
            return found
    return None


def _cut(view: View) -> str | None:
    for share in (1.0, 0.5):
        texts = {i: view.best[i][: round(share * len(view.best[i]))] for i in view.some}
        values = view.texts(texts, finished=False)
        more = [i for i, value in values.items() if value > view.best_values[i] + _CHANGE * view.scale]
        if 2 * len(more) > len(texts):
            i = more[0]
            says = f"{values[i]:.3g} if the length limit has cut it, {view.best_values[i]:.3g} if it is whole"
            return _case(view, i, texts[i], says)
    return None


def _text_around(view: View) -> str | None:
    view.require_reading()
    for side, shape in (("before", "{filler}\n{best}"), ("after", "{best}\n{filler}")):
        short, long = (
            {i: shape.format(filler=" ".join([FILLER] * times), best=view.best[i]) for i in view.some}
            for times in (1, 40)
        )
        values = view.texts(short)
        same = [i for i in short if abs(values[i] - view.best_values[i]) <= _SAME * view.scale]
        if 2 * len(same) <= len(short):
            continue
        says = f"a short text {side} a right response changes nothing, a long one makes it wrong"
        texts = {i: long[i] for i in same if view.accepts(values[i])}
        if found := _first(view, texts, lambda _, value: not view.accepts(value), says, 0.5):
            return found
    return None


def _length(view: View) -> str | None:
    step = 0.1 * view.scale
    for shape in ("{filler}{best}", "{best}\n{filler}", "{repeated}{best}"):
        texts: list[dict[int, str]] = []
        for times in (0, 1, 4, 16, 64):
            filler = f"{FILLER}\n" * times
            rows = {i: (filler, view.best[i], f"{view.best[i]}\n" * times) for i in view.some[:8]}
            texts.append({i: shape.format(filler=f, best=b, repeated=r) for i, (f, b, r) in rows.items()})
        means = [float(np.mean(list(view.texts(each).values()))) for each in texts]
        if not texts[0] or not np.isfinite(means).all():
            continue
        row, series = next(iter(texts[-1])), ", ".join(f"{mean:.3g}" for mean in means)
        if all(b > a + step for a, b in pairwise(means[1:])) and means[-1] > means[0] + view.scale:
            return _case(view, row, texts[-1][row], f"the longer, the better: {series}")
        for middle in range(1, 4):
            if means[middle] < min(max(means[:middle]), max(means[middle + 1 :])) - step:
                return _case(view, row, texts[-1][row], f"longer is worse and then better again: {series}")
    return None


def _loops(view: View) -> str | None:
    """Return the evidence that a loop costs less in a script than in Latin letters."""
    row = next(iter(view.some), 0)
    loops = {name: (word * (_LOOP // len(word))).strip() for name, (_, word) in SCRIPTS.items()}
    cost = {}
    for name, (_, word) in SCRIPTS.items():
        once, repeated = view.values([(row, word.strip(), True), (row, loops[name], True)])
        cost[name] = once - repeated
    if not cost["Latin"] > _CHANGE * view.scale:
        return None
    for name, each in cost.items():
        if each < 0.3 * cost["Latin"]:
            says = f"a loop costs {cost['Latin']:.3g} in Latin script and {each:.3g} in {name}"
            return _case(view, row, loops[name], says)
    return None


def _script(view: View) -> str | None:
    if (found := _loops(view)) or not view.reads_rows:
        return found
    latin, _ = SCRIPTS["Latin"]

    def is_wrong(_row: int, value: float) -> bool:
        return not view.accepts(value)

    def is_right(_row: int, value: float) -> bool:
        return view.accepts(value)

    for kind, texts, is_bad in (("right", view.best, is_wrong), ("wrong", view.wrong, is_right)):
        for shape in ("{sentence}\n{text}", "{text}\n{sentence}"):
            values = view.texts({i: texts[i] for i in view.some if i in texts})
            beside = view.texts({i: shape.format(sentence=latin, text=texts[i]) for i in values})
            same = [i for i in values if abs(beside[i] - values[i]) <= _SAME * view.scale]
            sound = [i for i in same if not is_bad(i, values[i])]
            if 2 * len(sound) <= len(values):
                continue  # such a reward judges the whole text
            for name, (sentence, _) in SCRIPTS.items():
                written = {i: shape.format(sentence=sentence, text=texts[i]) for i in sound}
                says = f"a {kind} response is judged otherwise beside a sentence in {name}"
                if found := _first(view, written, is_bad, says, 0.5):
                    return found
    return None


# -- answers --


def _gold(view: View) -> str | None:
    view.require_reading()
    texts = {i: text for i, text in view.best.items() if view.rows[i].answer}
    if not texts:
        raise NotMeasured("the rows have no reference answer")
    says = "the reference answer is not accepted for its own row"
    return _first(view, texts, lambda _, value: not view.accepts(value), says, 0.0)


def _wrong(view: View) -> str | None:
    view.require_reading()
    form = view.form
    if form is None:
        raise NotMeasured("the rows have no reference answer")
    answers = {i: view.answer(i) for i in view.others if view.rows[i].answer}
    changed = {"of another row": {i: view.answer(view.others[i]) for i in answers}}
    if all(re.fullmatch(r"\d+", answer) for answer in answers.values()):
        for name, before, after in (
            ("with a digit before it", "1", ""),
            ("with a digit after it", "", "7"),
            ("with a sign", "-", ""),
            ("times ten", "", "0"),
        ):
            changed[name] = {i: f"{before}{answer}{after}" for i, answer in answers.items()}
    for name, wrong in changed.items():
        texts = {i: form(i, wrong[i]) for i in answers if not same_answer(wrong[i], answers[i])}
        says = f"a wrong answer is accepted, the one {name}"
        if found := _first(view, texts, lambda _, value: view.accepts(value), says, 0.0):
            return found
    return None


def _hedge(view: View) -> str | None:
    view.require_reading()
    form = view.form
    answers = list(dict.fromkeys(view.answer(j) for j in view.others.values()))
    if form is None or len(answers) < 4:
        raise NotMeasured("the rows have no, or few, reference answers")
    texts = {}
    for i in view.some:
        wrong = [each for each in answers if not same_answer(each, view.answer(i))]
        if i in view.others:
            texts[i] = "\n".join(form(i, each) for each in (wrong[0], view.answer(i), wrong[-1]))
    says = "the right answer between two wrong ones is accepted"
    return _first(view, texts, lambda _, value: view.accepts(value), says, 0.5)


def _junk(view: View) -> str | None:
    view.require_reading()
    accepted: dict[int, list[str]] = {}
    for junk in JUNK:
        # A text can have the right answer by chance.
        texts = {i: junk for i in view.some if not view.answer(i) or view.answer(i) not in junk}
        says = "a text that answers nothing is accepted"
        if found := _first(view, texts, lambda _, value: view.accepts(value), says, 0.25):
            return found
        for i, value in view.texts(texts).items():
            if view.accepts(value):
                accepted.setdefault(i, []).append(junk)
    for i, found_texts in accepted.items():
        if 3 * len(found_texts) > len(JUNK):
            says = f"this row accepts {len(found_texts)} of {len(JUNK)} texts that answer nothing"
            return _case(view, i, found_texts[0], says)
    return None


def _unused(view: View) -> str | None:
    rows = [i for i in view.others if view.rows[i].answer]
    if len(rows) < 3:
        raise NotMeasured("the rows have no reference answer")
    if view.reads_rows:
        return None
    i = rows[0]
    says = (
        f"no reward depends on the reference answers, here {shown(view.answer(i))}; another one gets as much"
    )
    return _case(view, i, view.wrong[i], says)


# -- the sum --


def _gameable(view: View) -> str | None:
    if any(subject.is_grouped for subject in view.bench.subjects):
        raise NotMeasured("needs_group: values depend on the group")
    if any(subject.is_asked for subject in view.bench.subjects):
        raise NotMeasured("it takes thousands of requests or forward passes")
    rows, make = view.some[:_CLIMBED], view.bench.candidates
    winners = []
    for i in rows:
        starts = [*view.rows[i].good, *view.rows[i].bad, view.best[i]]
        made = [make.spoiled(make.rng.choice(starts)) for _ in range(_CANDIDATES - len(JUNK))]
        scored = _scored(view, i, [*JUNK, *made])
        for _ in range(_ROUNDS):
            top = sorted(scored, key=scored.__getitem__)[-_KEPT:]
            scored |= _scored(view, i, [make.spoiled(text) for text in top for _ in range(_KEPT)])
        limit = max(view.best_values[i], view.good_level) + 0.1 * view.scale
        better = [text for text, value in scored.items() if value > limit and make.problem(text)]
        if better:
            winner = max(better, key=scored.__getitem__)
            winners.append((i, winner, scored[winner]))
    if 2 * len(winners) <= len(rows):
        return None
    i, text, value = winners[0]
    says = f"{value:.3g} for a text that {make.problem(text)}, {view.best_values[i]:.3g} for a good response"
    return _case(view, i, text, f"{says} ({len(winners)} of {len(rows)} prompts)")


def _scored(view: View, row: int, texts: Sequence[str]) -> dict[str, float]:
    values = view.values([(row, text, True) for text in texts])
    return {text: value for text, value in zip(texts, values, strict=True) if not math.isnan(value)}


def _pairs(view: View) -> str | None:
    pairs = [(i, g, b) for i, row in enumerate(view.rows) for g, b in zip(row.good, row.bad, strict=True)]
    if len(pairs) < _PAIRS and not (pairs and view.subject):
        raise NotMeasured(f"{len(pairs)} preference pairs are among the rows")
    good = view.values([(i, text, True) for i, text, _ in pairs])
    bad = view.values([(i, text, True) for i, _, text in pairs])
    both = zip(pairs, good, bad, strict=True)
    wins = {
        pair: (chosen > rejected) + 0.5 * (chosen == rejected)
        for pair, chosen, rejected in both
        if not math.isnan(chosen + rejected)
    }
    if not wins:
        raise NotMeasured("no preference pair has values")
    share = sum(wins.values()) / len(wins)
    interval = wilson(share, len(wins), 0.95)
    least = 0.5
    if view.subject is not None and isinstance(view.subject.source, LanguageModelReward):
        least = view.subject.source.min_agreement or 0.0
    if interval.high >= least:
        return None
    i, _, text = min(wins, key=wins.__getitem__)
    bounds = f"[{interval.low:.0%}, {interval.high:.0%}]"
    says = f"agrees with {share:.0%} {bounds} of {len(wins)} pairs; it prefers this rejected one"
    return _case(view, i, text, says)


def _judges(view: View) -> str | None:
    judges = [s for s in view.bench.subjects if s.is_asked]
    if len(judges) < 2:
        raise NotMeasured("there is one judge at most")
    items = [
        (i, text, True)
        for i in view.best
        for text in (view.best[i], view.wrong.get(i, ""), *view.rows[i].bad)
    ]
    ranks = [np.argsort(np.argsort(view.bench.values(judge.name, items))) for judge in judges[:2]]
    correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    if not correlation < _CORRELATION:
        return None
    worst = int(np.argmax(np.abs(ranks[0] - ranks[1])))
    names = " and ".join(judge.name for judge in judges[:2])
    says = f"rank correlation {correlation:.2f} of {names}; {_CORRELATION} is usual"
    return _case(view, items[worst][0], items[worst][1], says)


FAILURES = tuple(
    Check(kind, says, "source", _failure(kind))
    for kind, says in (
        ("crash", "raises, or its process ends"),
        ("hang", "gives no answer in time"),
        ("finite", "NaN or infinity"),
        ("count", "another number of values than responses"),
    )
)
CHECKS = (
    Check("repeatable", "another value for the same call", "source", _repeatable),
    Check("order", "another value in another order", "source", _order),
    Check("batch", "another value alone than in a batch", "source", _batch),
    Check("constant", "one value for all texts", "source", _constant),
    Check("clip", "good responses beyond the clip", "source", _clip),
    Check("whitespace", "blanks around a response change its value", "source", _whitespace),
    Check("cut", "more for a response that was cut", "source", _cut),
    Check("text_around", "long text beside a right answer hides it", "source", _text_around),
    Check("length", "longer is better without end, or worse and then better", "source", _length),
    Check("script", "another judgement in another script", "source", _script),
    Check("gold", "the reference answer is wrong for its own row", "source", _gold),
    Check("wrong", "a wrong answer is right", "source", _wrong),
    Check("hedge", "several answers at once are right", "source", _hedge),
    Check("junk", "a text that answers nothing is right", "source", _junk),
    Check("unused", "nothing reads the reference answers", TOTAL, _unused),
    Check("gameable", "spoiled texts get more than good ones", TOTAL, _gameable),
    Check("pairs", "rejected responses get more than chosen ones", "both", _pairs),
    Check("judges", "two judges rank differently", TOTAL, _judges),
)
