"""The table of checks, and the score card that they make for the sources of `ppo.rewards`.

A check returns evidence, the response that shows the problem, or None. A source *reads the rows* if a right
response gets more than one that is right for another row. It *accepts* a response whose value is that of a
right one (`View.accepts`).
"""

from __future__ import annotations

import inspect
import math
import re
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rlhf_core.config.redact import shown
from rlhf_core.config.rewards import AnyReward, LanguageModelReward, ModelReward, PythonReward, RemoteReward
from rlhf_core.data.answers import same_answer
from rlhf_core.evaluation.reward_views import (
    ASKED_ROWS,
    FILLER,
    HOSTILE,
    JUNK,
    SCRIPTS,
    SECONDS,
    TOTAL,
    Candidates,
    Card,
    Finding,
    Item,
    NotMeasured,
    Result,
    Row,
    Subject,
    View,
    literals_of,
)
from rlhf_core.evaluation.statistics import wilson
from rlhf_core.rewards.compose import External
from rlhf_core.rewards.failures import Call, Outcome, check_smoke
from rlhf_core.rewards.language_model import asked_model
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.rewards.remote import RemoteService
from rlhf_core.rewards.rules import evaluate_rule

_CHANGE = 0.25
"""A change of this share of the scale counts."""
_SAME = 0.05
_LOOP = 240
"""Characters of a loop."""
_ALONE = 12
_FEW = 8
"""Rows for many texts."""
_CANDIDATES = 64
_ROUNDS = 4
_KEPT = 4
_PAIRS = 20


@dataclass(frozen=True)
class Check:
    """A row of the table."""

    name: str
    evidence: Callable[[View], str | None]
    """Its docstring says what is looked for, on the terminal as well."""
    advice: str

    def run(self, view: View) -> Finding:
        """Return its result."""
        try:
            if self != FAILS:
                _require_values(view)
            if view.is_grouped and self.evidence not in _WITH_GROUP:
                raise NotMeasured("its values depend on the group")
            evidence = self.evidence(view)
        except NotMeasured as reason:
            return self._finding(view, "not measured", str(reason))
        return self._finding(view, "finding" if evidence else "passes", evidence or "")

    def _finding(self, view: View, result: Result, evidence: str) -> Finding:
        advice = self.advice if result == "finding" else ""
        looks_for = inspect.getdoc(self.evidence) or ""
        return Finding(self.name, looks_for, view.name, result, evidence, advice)


def _require_values(view: View) -> None:
    if any(subject.ended for subject in view.subjects):
        raise NotMeasured("it is not called after what `fails` says")
    if not view.best:
        raise NotMeasured("no prompt has a chosen response or a reference answer")


def _shown(says: str, prompt: str, response: str) -> str:
    return f"{says}: response {shown(response, limit=160)} to {shown(prompt, limit=80)}"


def _case(view: View, row: int, text: str, says: str) -> str:
    return _shown(says, view.rows[row].prompt.prompt, text)


def _first(
    view: View, texts: Mapping[int, str], is_bad: Callable[[int, float], bool], says: str, least: float
) -> str | None:
    """Return the evidence of the first bad text, if more than a share `least` of them are bad."""
    values = view.texts(texts)
    bad = [row for row, value in values.items() if not math.isnan(value) and is_bad(row, value)]
    if not bad or len(bad) <= least * len(texts):
        return None
    row = bad[0]
    says = f"{says} ({len(bad)} of {len(texts)} prompts), value {values[row]:.3g}"
    return _case(view, row, texts[row], says)


# -- calls --


def _fails(view: View) -> str | None:
    """It raises, hangs, or returns no finite number."""
    [subject] = view.subjects
    if not (failures := subject.failures):
        return None
    found = failures[0]
    if not (subject.ended or subject.is_grouped):
        # A failure counts for the part of a batch in which no single cause was found.
        found = next((each for each in failures[:_ALONE] if subject.call([each[0]]).reasons), found)
    sample, reason = found
    return _shown(f"{reason}, for {len(failures)} texts", sample.prompt, sample.response)


def _difference(
    view: View, items: Sequence[Item], one: Sequence[float], two: Sequence[float], says: str
) -> str | None:
    for item, first, second in zip(items, one, two, strict=True):
        # A model behind a source rounds differently in another batch, which is no finding.
        if math.isnan(first + second) or math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-6):
            continue
        return _case(view, item[0], item[1], f"{first:.4g}, and {second:.4g} {says}")
    return None


def _repeatable(view: View) -> str | None:
    """The next call gives another value."""
    return _difference(view, *view.calls, "in the next call")


def _batch(view: View) -> str | None:
    """The rest of the batch, or its order, changes the value."""
    if _repeatable(view):
        raise NotMeasured("its values differ from call to call")
    items, values, _ = view.calls
    backwards = view.subjects[0].score(items[::-1])[::-1]
    found = _difference(view, items, values, backwards, "in a batch in reversed order")
    if found or view.is_grouped:
        return found
    alone = [view.subjects[0].score([item])[0] for item in items[:_ALONE]]
    return _difference(view, items[:_ALONE], values[:_ALONE], alone, "alone instead of in a batch")


# -- values --


def _constant(view: View) -> str | None:
    """All texts get one value."""
    items = [(i, text, True) for i in view.some[:8] for text in JUNK]
    found = [*view.values(items), *view.best_values.values(), *view.wrong_values.values()]
    values = {value for value in found if not math.isnan(value)}
    if len(values) > 1 or not items:
        return None
    i = items[0][0]
    says = f"all texts get {next(iter(values), math.nan):g}, also right ones"
    return _case(view, i, view.best[i], says)


def _beside(view: View, plain: str, changed: str, says: str) -> str | None:
    """Return the evidence that good responses in the form `changed` lose or win, where those in the form
    `plain` do not.
    """
    values = view.texts({i: plain.format(view.best[i]) for i in view.some})
    same = [i for i in values if abs(values[i] - view.best_values[i]) <= _SAME * view.scale]
    if 2 * len(same) <= len(values):
        return None  # such a reward judges the whole text

    def differs(row: int, value: float) -> bool:
        return abs(value - view.best_values[row]) > _CHANGE * view.scale

    return _first(view, {i: changed.format(view.best[i]) for i in same}, differs, says, 0.5)


def _whitespace(view: View) -> str | None:
    """A blank or line feed beside a response changes its value."""
    return (
        _beside(view, "{}", "{}\n", "a line feed after it changes the value")
        or _beside(view, "{}", "{} ", "a blank after it changes the value")
        or _beside(view, "{}", "\n{}", "a line feed before it changes the value")
    )


def _text_around(view: View) -> str | None:
    """A long text beside a right response changes its value."""
    view.require_reading()
    long, says = " ".join([FILLER] * 40), "a long text {} it changes the value"
    before = _beside(view, f"{FILLER}\n{{}}", f"{long}\n{{}}", says.format("before"))
    return before or _beside(view, f"{{}}\n{FILLER}", f"{{}}\n{long}", says.format("after"))


def _cut(view: View) -> str | None:
    """A response that the length limit has cut gets more."""
    for share in (1.0, 0.5):
        texts = {i: view.best[i][: round(share * len(view.best[i]))] for i in view.some}
        values = view.texts(texts, finished=False)
        more = [i for i, value in values.items() if value > view.best_values[i] + _CHANGE * view.scale]
        if 2 * len(more) > len(texts):
            i = more[0]
            says = f"{values[i]:.3g} if the length limit has cut it, {view.best_values[i]:.3g} if it is whole"
            return _case(view, i, texts[i], says)
    return None


def _length(view: View) -> str | None:
    """Longer is worse, and then better again."""
    texts = [{i: f"{FILLER}\n" * times + view.best[i] for i in view.some[:8]} for times in (0, 1, 4, 16, 64)]
    values = [view.texts(each) for each in texts]
    # A response that the reward does not score is left out at all lengths.
    scored = [i for i in texts[0] if all(math.isfinite(each[i]) for each in values)]
    if not scored:
        return None
    means = [statistics.fmean(each[i] for i in scored) for each in values]
    for at in range(1, len(means) - 1):
        if means[at] < min(max(means[:at]), max(means[at + 1 :])) - 0.1 * view.scale:
            row, series = scored[0], ", ".join(f"{mean:.3g}" for mean in means)
            return _case(view, row, texts[-1][row], f"with more and more text before it {series}")
    return None


def _script(view: View) -> str | None:
    """A loop costs less in another script than in Latin letters."""
    row = next(iter(view.some), 0)
    words = {name: (word.strip(), (word * (_LOOP // len(word))).strip()) for name, word in SCRIPTS.items()}
    cost = {}
    for name, (word, loop) in words.items():
        once, repeated = view.values([(row, word, True), (row, loop, True)])
        cost[name] = once - repeated
    if not cost["Latin"] > _CHANGE * view.scale:
        return None
    for name, each in cost.items():
        if each < 0.3 * cost["Latin"]:
            says = f"a loop costs {cost['Latin']:.3g} in Latin script and {each:.3g} in {name}"
            return _case(view, row, words[name][1], says)
    return None


# -- answers --


def _gold(view: View) -> str | None:
    """The reference answer is wrong for its own row."""
    view.require_reading()
    texts = {i: text for i, text in view.best.items() if view.rows[i].answer}
    if not texts:
        raise NotMeasured("the rows have no reference answer")
    says = "the reference answer is not accepted for its own row"
    return _first(view, texts, lambda _, value: not view.accepts(value), says, 0.0)


def _wrong(view: View) -> str | None:
    """A wrong answer is right."""
    view.require_reading()
    form = view.form
    if form is None:
        raise NotMeasured("the rows have no reference answer")
    answers = {i: view.answer(i) for i in view.others if view.rows[i].answer}
    changed = {"of another row": {i: view.answer(view.others[i]) for i in answers}}
    if all(re.fullmatch(r"\d+", answer) for answer in answers.values()):
        shapes = {
            "with a 1 before it": "1{}",
            "with a 7 after it": "{}7",
            "with a sign": "-{}",
            "times 10": "{}0",
        }
        for name, shape in shapes.items():
            changed[name] = {i: shape.format(answer) for i, answer in answers.items()}
    for name, wrong in changed.items():
        texts = {i: form(i, wrong[i]) for i in answers if not same_answer(wrong[i], answers[i])}
        says = f"a wrong answer is accepted, the one {name}"
        if found := _first(view, texts, lambda _, value: view.accepts(value), says, 0.0):
            return found
    return None


def _hedge(view: View) -> str | None:
    """Several answers at once are right."""
    view.require_reading()
    form = view.form
    answers = list(dict.fromkeys(view.answer(j) for j in view.others.values()))
    if form is None or len(answers) < 4:
        raise NotMeasured("the rows have no, or few, reference answers")
    texts = {}
    for i in view.some:
        wrong = [each for each in answers if not same_answer(each, view.answer(i))]
        if i in view.others and wrong:
            texts[i] = "\n".join(form(i, each) for each in (wrong[0], view.answer(i), wrong[-1]))
    says = "the right answer between two wrong ones is accepted"
    return _first(view, texts, lambda _, value: view.accepts(value), says, 0.5)


def _junk(view: View) -> str | None:
    """A text that answers nothing is right."""
    view.require_reading()
    for junk in JUNK:
        # A text can have the right answer by chance.
        texts = {i: junk for i in view.some if not view.answer(i) or view.answer(i) not in junk}
        says = "a text that answers nothing is accepted"
        if found := _first(view, texts, lambda _, value: view.accepts(value), says, 0.25):
            return found
    # One row of each right answer: a text may be another name of a frequent one.
    rows = list({view.rows[i].right.casefold(): i for i in view.some}.values())[:_FEW]
    for word in view.literals:
        # A part of the right answer may be right.
        texts = {i: word for i in rows if word.casefold() not in view.rows[i].right.casefold()}
        says = "a text of its own source is accepted"
        found = _first(view, texts, lambda _, value: view.accepts(value), says, 0.5)
        if found and 2 * len(texts) > len(rows):
            return found
    return None


def _unused(view: View) -> str | None:
    """Nothing depends on the reference answers."""
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
    """Spoiled texts get more than good ones."""
    if view.is_asked:
        raise NotMeasured("it takes thousands of requests")
    rows, make = view.some[:_FEW], Candidates(view.rows)
    winners = []
    for i in rows:
        starts = [*view.rows[i].good, *view.rows[i].bad, view.best[i]]
        made = [make.spoiled(make.rng.choice(starts)) for _ in range(_CANDIDATES - len(JUNK))]
        scored = _scored(view, i, [*JUNK, *made])
        for _ in range(_ROUNDS):
            top = sorted(scored, key=scored.__getitem__)[-_KEPT:]
            scored |= _scored(view, i, [make.spoiled(text) for text in top for _ in range(_KEPT)])
        limit = max(view.best_values[i], view.good_level) + 0.1 * view.scale
        # A text that wins and is not bad is no fault: a reward may be right to prefer it.
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
    """Rejected responses get more than chosen ones."""
    pairs = [(i, g, b) for i, row in enumerate(view.rows) for g, b in zip(row.good, row.bad, strict=True)]
    if len(pairs) < _PAIRS and (view.is_total or not pairs):
        raise NotMeasured(f"{len(pairs)} preference pairs are among the rows")
    # In one call, because a value may depend on the other response.
    values = view.values([(i, text, True) for i, good, bad in pairs for text in (good, bad)])
    wins = {
        pair: (chosen > rejected) + 0.5 * (chosen == rejected)
        for pair, chosen, rejected in zip(pairs, values[::2], values[1::2], strict=True)
        if not math.isnan(chosen + rejected)
    }
    if not wins:
        raise NotMeasured("no preference pair has values")
    share = sum(wins.values()) / len(wins)
    interval = wilson(share, len(wins), 0.95)
    if interval.high >= 0.5:
        return None
    i, _, text = min(wins, key=wins.__getitem__)
    bounds = f"[{interval.low:.0%}, {interval.high:.0%}]"
    says = f"agrees with {share:.0%} {bounds} of {len(wins)} pairs; it prefers this rejected one"
    return _case(view, i, text, says)


FAILS = Check("fails", _fails, "correct it: a run would end, or leave such responses out")
AGREES = Check("pairs", _pairs, "correct the sign of the reward or of a weight, or the data's columns")
OF_SOURCES = (
    Check("repeatable", _repeatable, "remove what it draws or remembers, or set its seed"),
    Check("batch", _batch, "score each response by itself, or set `normalize: batch` or `needs_group`"),
    Check("constant", _constant, "compare what it looks for with the responses of the data"),
    Check("whitespace", _whitespace, "strip the response before it is compared"),
    Check("text_around", _text_around, "search the whole response"),
    Check("cut", _cut, "pay nothing for a response that is not `finished`"),
    Check("length", _length, "bound the length that it computes with"),
    Check("script", _script, "count characters, or words as `rlhf_core.data.words` finds them"),
    Check("gold", _gold, "correct how it reads answers, or leave such rows out"),
    Check("wrong", _wrong, "compare the whole answer, exactly"),
    Check("hedge", _hedge, "read one answer, the last one"),
    Check("junk", _junk, "pay nothing if no answer is found"),
    AGREES,
)
# Of the sum alone: a format or a length is sound, and pays for nonsense of the right form (decision 8).
OF_TOTAL = (
    Check("unused", _unused, "add a reward that reads them, such as `type: answer`, or correct yours"),
    Check("gameable", _gameable, "bound what can be repeated, and add a reward for what is wanted"),
    AGREES,
)
_WITH_GROUP = (_fails, _repeatable, _batch, _pairs)
"""Are made with several responses to a prompt in one call."""


# -- the score card --


def check_sources(
    sources: Sequence[AnyReward],
    rows: Sequence[Row],
    encode: Callable[[str], Sequence[int]],
    *,
    ask: bool = True,
    checks: Container[str] | None = None,
) -> Card:
    """Check the sources one by one, and their weighted sum. The reward model is skipped.

    Args:
        sources: The sources of `ppo.rewards`.
        rows: What they are checked with.
        encode: Converts the text of a response to ids, EOS included.
        ask: Whether services and language models are asked; otherwise they are skipped.
        checks: Names of the checks besides those of failures; None for all.

    Raises:
        ConfigError: A function cannot be loaded, or a response of its `smoke` has a wrong value.
        RewardError: A response of `smoke` has no value, or no retry can help: a wrong key or address.
    """
    skipped: dict[str, str] = {}
    with ExitStack() as opened:
        subjects = []
        for source in sources:
            if isinstance(source, ModelReward):
                skipped[source.used_name] = "the checks are for rewards without training"
            elif isinstance(source, RemoteReward | LanguageModelReward) and not ask:
                skipped[source.used_name] = "it is asked over the network"
            else:
                call = _call_of(source, opened)
                code = call.code if isinstance(call, PythonFunction) else None
                subjects.append(Subject(source, call, rows, encode, literals_of(code or b"")))
        for subject in subjects:
            # Of all rows, so that `fails` has seen each prompt, also where other checks look at some.
            few = rows[:ASKED_ROWS] if subject.is_asked else rows
            subject.values([(i, text, True) for i in range(len(few)) for text in (FILLER, "")])
            # Before all checks: a source that hangs is not called again, and costs its time limit once.
            subject.values([(0, text, True) for text in HOSTILE])
        views = [View(subject.source.used_name, [subject], rows) for subject in subjects]
        counted = {source.used_name for source in sources if source.weight}
        # The sum without one of its sources would be another reward.
        if counted and not counted & set(skipped):
            views.append(View(TOTAL, subjects, rows))
        found = []
        for view in views:
            if view.is_asked:
                view.rows = rows[:ASKED_ROWS]
            table = OF_TOTAL if view.is_total else OF_SOURCES
            found += [check.run(view) for check in table if checks is None or check.name in checks]
        single = [view for view in views if not view.is_total]
        # At the end, because every check may make a source fail.
        failed = [FAILS.run(view) for view in single]
        unscored = {view.name: view.unscored for view in single}
    return Card((*failed, *found), len(rows), skipped, unscored)


def _call_of(source: AnyReward, opened: ExitStack) -> Call:
    """Return the function that scores with a source, for a Python function without retries and with a short
    time limit.
    """
    external: External
    if isinstance(source, PythonReward):
        # A retry would hide the failure that is looked for, and take the time limit again.
        limits = {"retries": 0, "timeout": min(source.timeout, SECONDS)}
        external = PythonFunction(source.model_copy(update=limits))
    elif isinstance(source, RemoteReward):
        external = RemoteService(source)
    elif isinstance(source, LanguageModelReward):
        external = asked_model(source)
    else:
        return lambda samples: Outcome.of([evaluate_rule(source, each) for each in samples])
    opened.callback(external.close)
    check_smoke(source.used_name, source.smoke, external)
    return external
