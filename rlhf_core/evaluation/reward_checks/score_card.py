"""Makes the score card of the sources of `ppo.rewards`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from rlhf_core.config.rewards import AnyReward, LanguageModelReward, ModelReward, PythonReward, RemoteReward
from rlhf_core.evaluation.reward_checks.bench import ASKED_ROWS, SECONDS, TOTAL, Bench, Card, Subject, View
from rlhf_core.evaluation.reward_checks.checks import CHECKS, FAILURES
from rlhf_core.evaluation.reward_checks.material import HOSTILE, Row
from rlhf_core.rewards.failures import Call, Outcome, check_smoke
from rlhf_core.rewards.language_model import LanguageModelGrades
from rlhf_core.rewards.python_function import PythonFunction
from rlhf_core.rewards.remote import RemoteService
from rlhf_core.rewards.rules import evaluate_rule


def check_sources(
    sources: Sequence[AnyReward],
    rows: Sequence[Row],
    encode: Callable[[str], Sequence[int]],
    *,
    score_clip: float | None = None,
    model: Call | None = None,
    ask: bool = True,
) -> Card:
    """Check the sources one by one, and their weighted sum.

    Args:
        sources: The sources of `ppo.rewards`.
        rows: What they are checked with.
        encode: Converts the text of a response to ids, EOS included.
        score_clip: `ppo.score_clip`.
        model: Scores with the reward model; None: it is skipped.
        ask: Whether services and language models are asked; otherwise they are skipped.

    Raises:
        ConfigError: A function cannot be loaded, or a response of its `smoke` has a wrong value.
    """
    skipped: dict[str, str] = {}
    with ExitStack() as opened:
        subjects = []
        for source in sources:
            if isinstance(source, ModelReward) and model is None:
                skipped[source.used_name] = "its model is not trained yet"
            elif isinstance(source, LanguageModelReward) and source.compare is not None:
                skipped[source.used_name] = (
                    "with compare a response has no value of its own; min_agreement measures it before PPO"
                )
            elif isinstance(source, RemoteReward | LanguageModelReward) and not ask:
                skipped[source.used_name] = "it is asked over the network"
            else:
                subjects.append(Subject(source, _call_of(source, model, opened)))
        if any(subject.is_asked for subject in subjects):
            rows = rows[:ASKED_ROWS]
        bench = Bench(rows, subjects, encode, score_clip)
        if rows:
            bench.values(TOTAL, [(0, text, True) for text in HOSTILE])
        views = [View(bench, subject.name, subject) for subject in subjects]
        counted = [source for source in sources if source.weight]
        if counted and not {source.used_name for source in counted} & set(skipped):
            views.append(View(bench, TOTAL, None))
        found = []
        for view in views:
            for check in CHECKS:
                if check.applies(view):
                    found.append(check.run(view))
        # At the end, because every check may make a source fail.
        failed = [check.run(view) for view in views if view.subject for check in FAILURES]
    return Card((*failed, *found), len(rows), skipped)


def _call_of(source: AnyReward, model: Call | None, opened: ExitStack) -> Call:
    """Return the function that scores with a source, without retries and with a short time limit."""
    if isinstance(source, PythonReward | RemoteReward | LanguageModelReward):
        limits = {"retries": 0, "on_error": "mask", "timeout": min(source.timeout, SECONDS)}
        if not isinstance(source, PythonReward):
            limits = {"on_error": "mask"}
        source = source.model_copy(update=limits)
        external: PythonFunction | RemoteService | LanguageModelGrades
        if isinstance(source, PythonReward):
            external = PythonFunction(source)
        elif isinstance(source, RemoteReward):
            external = RemoteService(source)
        else:
            external = LanguageModelGrades(source)
        opened.callback(external.close)
        check_smoke(source.used_name, source.smoke, external)
        return external
    if isinstance(source, ModelReward):
        assert model is not None
        return model
    return lambda samples: Outcome.of([evaluate_rule(source, each) for each in samples])
