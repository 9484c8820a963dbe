"""The end of a run: `summary.json`, the table on the terminal and the Markdown for Prefect's pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlhf_core.evaluation.measures import (
    LENGTH_CONTROLLED,
    MEASURES,
    MODELS,
    NOT_IDENTIFIED,
    OVER_SFT,
    PPO_OVER_DPO,
    endless_models,
    flat_name,
    titles_of,
)
from rlhf_core.pipeline import POLICIES, STAGES, StageName
from rlhf_core.types import Findings

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_core.executors.spec import StageRecord
    from rlhf_core.types import ArtifactRef

_INTERVAL = ("mean", "low", "high")
_PPO_MINUS_DPO = "ppo_minus_dpo"


def summarize(
    records: Mapping[StageName, StageRecord], seconds: float, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `summary.json`. Values that a stage did not measure are left out.

    docs/outputs.md describes the fields.

    Args:
        records: The outcome of each stage.
        seconds: Duration of the whole command, from the start of its process.
        identity: Further fields that name the run.
    """
    summary: dict[str, Any] = {"seconds": round(seconds, 2), "stages": {}, **identity}
    for name, record in records.items():
        summary["stages"][name] = {
            "seconds": round(record.seconds, 2),
            "reused": record.reused,
            "how": record.how,
            "made_in_seconds": made_in(record),
            "key": record.ref.key,
            "artifact": record.ref.uri,
            "metrics": dict(record.ref.metrics),
        }
        findings = STAGES[name].load_findings()
        if findings is not None and (found := findings.read(record.ref)) is not None:
            summary[findings.entry or name] = found
    # The registered policy, else the last one that was trained: no other stage has this attribute.
    for record in reversed([records[name] for name in STAGES if name in records]):
        if "weights_sha256" in record.ref.attributes:
            summary["weights_sha256"] = record.ref.attributes["weights_sha256"]
            break
    return summary


def made_in(record: StageRecord) -> float | None:
    """Return the seconds of all work behind a stage; None if its artifact does not say them."""
    # The attribute counts the work of all attempts. For a stage that ran as a whole, its start counts, too.
    if record.how == "ran":
        return round(record.seconds, 2)
    return float(record.ref.attributes["seconds"]) if "seconds" in record.ref.attributes else None


def _accuracies(ref: ArtifactRef) -> dict[str, Any] | None:
    found = {name: value for name, value in ref.metrics.items() if name.startswith("accuracy")}
    return found if "accuracy" in found else None


def _implicit_rewards(ref: ArtifactRef) -> dict[str, Any] | None:
    names = ("rewards/chosen", "rewards/rejected", "accuracy", "margin")
    found = _present(ref.metrics, names)
    if len(found) < len(names):
        return None
    return {name.removeprefix("rewards/"): value for name, value in found.items()}


def _sampled(ref: ArtifactRef) -> dict[str, Any]:
    counts = {name: int(ref.metrics.get(name, 0)) for name in ("pairs", "best")}
    # Answers of PPO's policy have no attribute.
    return {**counts, "policy": ref.attributes.get("policy", "ppo"), "rl_algorithm": _algorithm(ref)}


def _algorithm(ref: ArtifactRef) -> str:
    return ref.attributes.get("rl_algorithm", "PPO")  # artifacts of earlier releases do not name it


def _registration(ref: ArtifactRef) -> dict[str, Any]:
    found = _present(ref.attributes, ("model", "version", "policy", "rule", "reason"))
    # Attributes of artifacts are texts.
    return found | {"champion": ref.attributes.get("champion") == "True"}


def _evaluation(ref: ArtifactRef) -> dict[str, Any]:
    found: dict[str, Any] = {"rl_algorithm": _algorithm(ref)}
    metrics = {name: value for name, value in ref.metrics.items() if not name.startswith("by_source/")}
    if policies := {policy: table for policy in POLICIES if (table := _of_policy(ref, policy))}:
        found["policies"] = policies
    policy_of_difference = {flat_name("difference", policy): policy for policy in POLICIES}
    # Sorted, because the order of a set of texts differs between processes, and the table follows it.
    for name in sorted({key.rpartition("/")[0] for key in metrics if key.endswith("/mean")}):
        measure, _, who = name.rpartition("/")
        interval = _interval(metrics, name)
        if interval is None:
            continue
        if who in policy_of_difference:
            differences = found.setdefault(measure, {}).setdefault("difference", {})
            differences[policy_of_difference[who]] = interval
        elif who in MODELS or who == _PPO_MINUS_DPO:
            found.setdefault(measure, {})[who] = interval
    found |= _win_rates(metrics, PPO_OVER_DPO, PPO_OVER_DPO)
    if "judge" in ref.attributes:
        found["judge"] = ref.attributes["judge"]
    if interval := _interval(metrics, "language_model/agreement"):
        found["judge_agreement"] = interval
        found["judge_inconsistent"] = metrics["inconsistent"]
    rates = {name: metrics[f"eos_rate/{name}"] for name in MODELS if f"eos_rate/{name}" in metrics}
    if rates:
        found["eos_rate"] = rates
    return found


def _of_policy(ref: ArtifactRef, policy: str) -> dict[str, Any]:
    """Return the results of a policy; empty if it was not evaluated."""
    found = _win_rates(ref.metrics, OVER_SFT, flat_name(OVER_SFT, policy))
    if (kl := flat_name("kl", policy)) in ref.metrics:
        found["kl"] = ref.metrics[kl]
    lengths = [ref.metrics.get(f"length/{model}", 0.0) for model in (policy, "sft")]
    if all(lengths):
        found["length_ratio"] = lengths[0] / lengths[1]
    if (trained_on := flat_name("judge_trained_on", policy)) in ref.attributes:
        found["judge_trained_on"] = ref.attributes[trained_on] == "True"
    if (fallen := flat_name("fallen", policy)) in ref.attributes:
        found["fallen"] = ref.attributes[fallen]
    return found


def _win_rates(metrics: Mapping[str, float], name: str, metric: str) -> dict[str, Any]:
    """Return a win rate and the length-controlled one as far as they were measured, under `name`."""
    found = {}
    for suffix in ("", LENGTH_CONTROLLED):
        if interval := _interval(metrics, f"{metric}{suffix}"):
            found[f"{name}{suffix}"] = interval
            if f"{metric}{suffix}/identified" in metrics:
                interval["identified"] = metrics[f"{metric}{suffix}/identified"]
    return found


def _interval(metrics: Mapping[str, float], prefix: str) -> dict[str, float] | None:
    if not all(f"{prefix}/{part}" in metrics for part in _INTERVAL):
        return None
    return {part: metrics[f"{prefix}/{part}"] for part in _INTERVAL}


def headline(stage: str, metrics: Mapping[str, float], count: int = 4) -> str:
    """Return the main metrics of a stage on one line, or the first ones if none of them was measured."""
    row = STAGES.get(cast(StageName, stage))  # progress bars also have tasks that are no stages
    main = {} if row is None else _present(metrics, row.headline)
    shown = []
    for name, value in list((main or metrics).items())[:count]:
        short_name = name.removeprefix(f"{stage}/").removesuffix("/mean")
        shown.append(f"{short_name}={_short(value)}")
    return "  ".join(shown)


def _present(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


_LABELS = {"gold_reward_exchanged": "gold reward, prompts exchanged"}


def results(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the findings of a run as (name, value) rows, in words. The last stages are the first rows."""
    rows: list[tuple[str, str]] = []
    for name, row in reversed(STAGES.items()):
        findings = row.load_findings()
        if findings is not None and (entry := findings.entry or name) in summary:
            rows += findings.rows(summary[entry])
    return rows


def verdict(summary: Mapping[str, Any]) -> str:
    """Return the result in one line: `win rate 94.8 % [90.9, 97.8], KL 5.05, champion`. Empty if the run has
    neither an evaluation nor a registration.
    """
    parts = []
    found = _registered_policy(summary)
    if OVER_SFT in found:
        mean, low, high = (100 * found[OVER_SFT][part] for part in _INTERVAL)
        parts.append(f"win rate {mean:.1f} % [{low:.1f}, {high:.1f}]")
    if "kl" in found:
        parts.append(f"KL {found['kl']:.3g}")
    if "reason" in (registered := summary.get("registration", {})):
        parts.append(_outcome(registered))
    if found.get("judge_trained_on"):
        of_pairs = policy_of(summary) == "dpo"
        parts.append(f"judged by the {'pairs' if of_pairs else 'reward'} of its training")
    return ", ".join(parts)


def outcome(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the report of a run has besides its evaluation: the promotion, and with it the accuracy of
    the reward model and the time of all stages, also reused ones.
    """
    rows = _rows_of_registration(summary.get("registration", {}))
    if not rows:
        return [("promotion", "not registered in this run")]
    if "reward" in summary:
        rows += _rows_of_accuracy(summary["reward"])
    return [*rows, ("all stages", duration(3600 * headline_metrics(summary)["hours"]))]


def headline_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the main metrics of a run, for the list of runs in MLflow."""
    found = _registered_policy(summary)
    evaluation = summary.get("evaluate", {})
    policy = policy_of(summary)
    made = [entry["made_in_seconds"] or 0.0 for entry in summary["stages"].values()]
    metrics = {"hours": sum(made) / 3600, **_present(found, ("kl", "length_ratio"))}
    if OVER_SFT in found:
        metrics |= {
            OVER_SFT: found[OVER_SFT]["mean"],
            f"{OVER_SFT}_low": found[OVER_SFT]["low"],
        }
    for measure, name in _HEADLINES.items():
        if policy in evaluation.get(measure, {}):
            metrics[name] = evaluation[measure][policy]["mean"]
    if policy in evaluation.get("eos_rate", {}):
        metrics["eos_rate"] = evaluation["eos_rate"][policy]
    for stage in ("reward", "dpo"):
        if "accuracy" in summary.get(stage, {}):
            metrics[f"{stage}_accuracy"] = summary[stage]["accuracy"]
    if "margin" in summary.get("dpo", {}):
        metrics["dpo_margin"] = summary["dpo"]["margin"]
    if "reason" in (registered := summary.get("registration", {})):
        metrics["champion"] = float(registered["champion"])
    return metrics


_HEADLINES = {"reward_model": "reward", "judge_model": "judge", "gold_reward": "gold_reward"}
"""Names in MLflow of the means of measures."""


def policy_of(summary: Mapping[str, Any]) -> str:
    """Return the policy that the run is about: the registered one, or that which was evaluated."""
    policies = summary.get("evaluate", {}).get("policies", {})
    wanted = str(summary.get("policy", "ppo"))
    return wanted if wanted in policies else next(iter(policies), wanted)


def _registered_policy(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table of this policy; empty if there was no evaluation."""
    policies = summary.get("evaluate", {}).get("policies", {})
    table: Mapping[str, Any] = policies.get(policy_of(summary), {})
    return table


def _rows_of_accuracy(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("reward model, held-out accuracy", _accuracy(found, "accuracy"))]
    if "accuracy_exchanged" in found:
        rows.append(("the same, prompts exchanged", _accuracy(found, "accuracy_exchanged")))
    return rows


def _rows_of_implicit_rewards(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    chosen, rejected = found["chosen"], found["rejected"]
    remark = ""
    if max(chosen, rejected) < 0:
        remark = ": both fall, so the policy moves to responses that are in no pair"
    return [
        ("DPO, held-out accuracy, margin", f"{found['accuracy']:.3f}, {found['margin']:.3f}"),
        ("DPO, implicit reward of chosen, of rejected", f"{chosen:.3f}, {rejected:.3f}{remark}"),
    ]


def _rows_of_samples(sampled: Mapping[str, Any]) -> list[tuple[str, str]]:
    name = f"sampled pairs, demonstrations, {titles_of(sampled['rl_algorithm'])[sampled['policy']]}"
    return [(name, f"{sampled['pairs']}, {sampled['best']}")]


def _outcome(registered: Mapping[str, Any]) -> str:
    return "champion" if registered["champion"] else "not promoted"


def _rows_of_registration(registered: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "reason" not in registered:
        return []
    return [
        ("promotion", f"{registered['model']} version {registered['version']}: {_outcome(registered)}"),
        ("reason", registered["reason"]),
    ]


def _rows_of_evaluation(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    policies, titles = evaluation.get("policies", {}), titles_of(evaluation["rl_algorithm"])
    judge = _judged(evaluation, titles)
    for policy, table in policies.items():
        rows += _rows_of_win_rate(table, OVER_SFT, f"win rate, {titles[policy]} over SFT{judge}")
    rows += _rows_of_win_rate(evaluation, PPO_OVER_DPO, f"win rate, {titles['ppo']} over DPO{judge}")
    for policy, table in policies.items():
        suffix = _suffix(policy, titles)
        if "kl" in table:
            rows.append((f"KL to the SFT model{suffix}", f"{table['kl']:.3g} nats per response"))
        if "length_ratio" in table:
            rows.append((f"length of responses{suffix}", f"{table['length_ratio']:.2f} times that of SFT"))
        if "fallen" in table:
            rows.append((f"regression sets that failed{suffix}", table["fallen"]))
    if problems := endless_models(evaluation.get("eos_rate", {}), titles):
        rows.append(("responses that never end", "; ".join(problems)))
    # What is measured as a check of other measures comes last.
    for measure in sorted(evaluation, key=lambda name: (name in _LABELS, name not in MEASURES)):
        rows += _rows_of_measure(measure, evaluation[measure], titles)
    if "judge_agreement" in evaluation:
        rows.append(("judge, agreement with held-out pairs", _with_interval(evaluation["judge_agreement"])))
        changed = f"{evaluation['judge_inconsistent']:.3f}"
        rows.append(("verdicts that change with the order (ties)", changed))
    return rows


def _suffix(policy: str, titles: Mapping[str, str]) -> str:
    """Return what the rows of a policy have after their names: those of PPO's policy have nothing."""
    return "" if policy == "ppo" else f", {titles[policy]}"


def _rows_of_measure(measure: str, values: Any, titles: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the rows of a measure with a value of each model; none for other entries of the summary."""
    if not isinstance(values, dict) or not isinstance(values.get("sft"), dict):
        return []
    name = measure.replace("rules/", "rule ").replace("regression/", "regression set ")
    label = _LABELS.get(measure, name.replace("_", " "))
    shown = [(title, values.get(model)) for model, title in titles.items()]
    for policy in POLICIES:
        title = f"difference by prompt{_suffix(policy, titles)}"
        shown.append((title, values.get("difference", {}).get(policy)))
    shown.append((f"{titles['ppo']} minus DPO by prompt", values.get(_PPO_MINUS_DPO)))
    return [(f"{label}, {title}", _with_interval(each)) for title, each in shown if each]


def _rows_of_win_rate(found: Mapping[str, Any], name: str, label: str) -> list[tuple[str, str]]:
    rows = []
    if name in found:
        rows.append((label, _with_interval(found[name])))
    if controlled := found.get(f"{name}{LENGTH_CONTROLLED}"):
        remark = f" ({NOT_IDENTIFIED})" if "identified" in controlled else ""
        rows.append((f"the same, length-controlled{remark}", _with_interval(controlled)))
    return rows


def _judged(evaluation: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """Return the judge as a suffix of the row's name."""
    if "judge" not in evaluation:
        return ""
    policies, trained = evaluation.get("policies", {}), ""
    main = next(iter(policies), None)
    if main is not None and policies[main].get("judge_trained_on"):
        trained = f", which {titles[main]} was trained on"
        if main == "dpo":
            trained = ", which is not independent of DPO's training"
    return f" (judge: {evaluation['judge']}{trained})"


def _accuracy(found: Mapping[str, float], name: str) -> str:
    # Artifacts of earlier releases have no interval.
    if f"{name}_low" not in found:
        return f"{found[name]:.3f}"
    return _with_interval({"mean": found[name], "low": found[f"{name}_low"], "high": found[f"{name}_high"]})


def _with_interval(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.3f}  [{interval['low']:.3f}, {interval['high']:.3f}]"


def stage_table(summary: Mapping[str, Any]) -> Table:
    """Return a table with one line per stage: time, reused or not, its first numbers."""
    from rich.table import Table

    table = Table(show_footer=True)
    table.add_column("stage", "total", no_wrap=True)
    table.add_column("time", duration(summary["seconds"]), justify="right", no_wrap=True)
    table.add_column("", "", no_wrap=True)
    table.add_column("results", "", overflow="fold")
    for name, entry in summary["stages"].items():
        numbers = headline(name, entry["metrics"])
        if name == "sft" and "eval_loss" not in entry["metrics"]:
            numbers = f"the base model, not trained  {numbers}"
        table.add_row(name, _time(entry), entry["how"], numbers)
    return table


def nothing_made(summary: Mapping[str, Any]) -> bool:
    """Return whether every stage was reused."""
    return all(entry["reused"] for entry in summary["stages"].values())


def is_continued_by(summary: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether `known`, the file of an earlier command of this run, has the artifacts of all stages of
    `summary`, and those of later stages.
    """
    found = known.get("stages")
    if not isinstance(found, dict) or len(found) <= len(summary["stages"]):
        return False
    if any(known.get(name) != summary[name] for name in ("mlflow_run_id", "tracking_uri")):
        return False
    for name, entry in summary["stages"].items():
        before = found.get(name)
        if not isinstance(before, dict) or before.get("artifact") != entry["artifact"]:
            return False
    return True


def _time(entry: Mapping[str, Any]) -> str:
    """Return the duration of a stage as it was logged at its end; of one that was continued, also the time of
    all runs; of a reused one, the time in which it was made.
    """
    spent, made = entry["seconds"], entry["made_in_seconds"]
    if entry["how"] == "ran" or made is None:
        return duration(spent)
    if entry["reused"]:
        return f"made in {duration(made)}"
    # The time of all attempts has no starts of processes, so it can be less.
    return duration(spent) if made <= spent else f"{duration(spent)} of {duration(made)}"


def result_table(summary: Mapping[str, Any]) -> Table:
    """Return a table of what the run found, in words."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in results(summary):
        table.add_row(escape(name), escape(value))
    return table


def stage_markdown(stage: str, record: StageRecord, links: Mapping[str, str]) -> str:
    """Return a stage's page in Prefect."""
    ref = record.ref
    lines = [
        f"# {stage}: {'reused' if record.reused else 'done'} in {duration(record.seconds)}",
        "",
        *_markdown_table(
            ("metric", "value"), [(name, f"{value:.6g}") for name, value in ref.metrics.items()]
        ),
        "",
        f"- artifact: `{ref.uri}`",
        f"- key: `{ref.key}`, manifest sha256: `{ref.digest}`",
        *_markdown_links(links),
    ]
    return "\n".join(lines)


def run_markdown(summary: Mapping[str, Any]) -> str:
    """Return the whole run's page in Prefect."""
    stages = [
        (name, _time(entry), entry["how"], entry["artifact"]) for name, entry in summary["stages"].items()
    ]
    end = "reused" if nothing_made(summary) else "finished"
    lines = [f"# Pipeline {end} in {duration(summary['seconds'])}", ""]
    if line := verdict(summary):
        lines += [f"**{line}**", ""]
    if reason := summary.get("registration", {}).get("reason"):
        lines += [_markdown_text(reason), ""]
    lines += [
        *_markdown_table(("result", "value"), results(summary)),
        "",
        *_markdown_table(("stage", "time", "", "artifact"), stages),
        "",
        *_markdown_links(summary["where"]),
    ]
    return "\n".join(lines)


def _markdown_links(addresses: Mapping[str, str]) -> list[str]:
    lines = []
    for name, address in addresses.items():
        is_link = address.startswith("http")
        lines.append(f"- [{name}]({address})" if is_link else f"- {name}: `{address}`")
    return lines


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(map(_markdown_text, row)) + " |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _markdown_text(text: str) -> str:
    """Return `text` escaped: names of files and reasons of people can have any characters."""
    from rlhf_core.data.card import markdown_cell

    return markdown_cell(text)


def duration(seconds: float) -> str:
    """Return a text such as `42.1 s`, `3 min 05 s` or `2 h 07 min`."""
    # Not 100: the text of 99.96 would be 100.0 s.
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 100:
        return f"{minutes} min {round(seconds) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


REWARD = Findings(_accuracies, _rows_of_accuracy)
DPO = Findings(_implicit_rewards, _rows_of_implicit_rewards)
SAMPLE = Findings(_sampled, _rows_of_samples)
EVALUATION = Findings(_evaluation, _rows_of_evaluation)
REGISTRATION = Findings(_registration, _rows_of_registration, entry="registration")
