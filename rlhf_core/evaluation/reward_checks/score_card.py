"""Makes the score card of the sources of `ppo.rewards`."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack

from rlhf_core.config.rewards import AnyReward, LanguageModelReward, ModelReward, PythonReward, RemoteReward
from rlhf_core.evaluation.reward_checks.checks import FAILS, OF_SOURCES, OF_TOTAL
from rlhf_core.evaluation.reward_checks.material import FILLER, HOSTILE, Row, literals_of
from rlhf_core.evaluation.reward_checks.views import ASKED_ROWS, SECONDS, TOTAL, Card, Subject, View
from rlhf_core.rewards.comparisons import asked_model
from rlhf_core.rewards.compose import External
from rlhf_core.rewards.failures import Call, Outcome, check_smoke
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.rewards.remote import RemoteService
from rlhf_core.rewards.rules import evaluate_rule


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
            few = rows[:ASKED_ROWS] if subject.is_asked else rows
            subject.values([(i, text, True) for i in range(len(few)) for text in (FILLER, "")])
            subject.values([(0, text, True) for text in HOSTILE])
        views = [View(subject.source.used_name, [subject], rows) for subject in subjects]
        counted = {source.used_name for source in sources if source.weight}
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
