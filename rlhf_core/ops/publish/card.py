"""The model card of a registered policy, made from its lineage. `card.md.j2` is its text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.evaluate import PolicyStage
from rlhf_core.config.redact import scrubbed
from rlhf_core.data.hub import cached_card
from rlhf_core.errors import InputError
from rlhf_core.evaluation.measures import MEASURES, NOT_IDENTIFIED, endless_models, results_of, titles_of
from rlhf_core.evaluation.statistics import failed_sets, regression_differences, units
from rlhf_core.pipeline import STAGES
from rlhf_core.run.registered_policies import RegisteredPolicy, RegisteredVersion

log = logging.getLogger(__name__)

_TEMPLATE = Path(__file__).with_name("card.md.j2")
_HUB_DATA = re.compile(r"hub:(?P<name>.+?)@(?P<commit>[^:]+):")
"""Digest of a data set of the hub, with its split."""
_IDENTIFIER = re.compile(r"[\w.-]+")
_OF_NUMBERS = ("first", "match", "away", "judge", "min_prompts", "min_win_rate")
"""Rules whose reason consists of numbers. Others can contain messages of errors, and paths in them."""


def model_card(policy: RegisteredPolicy) -> str:
    """Return the model card, in Markdown."""
    from huggingface_hub import ModelCard, ModelCardData

    evaluation = _json(policy, "evaluate", "evaluation.json")
    if evaluation and "policies" not in evaluation:
        log.warning(
            "%s version %s was evaluated by an earlier release, so its card has no results of that",
            policy.name, policy.version.version,
        )  # fmt: skip
        evaluation = {}
    own: Mapping[str, Any] = {}
    if evaluation:
        own = results_of(evaluation, policy.trained_by)
    titles = titles_of(evaluation.get("rl_algorithm", "PPO"))
    base, first_base = _base(policy)[0], _base(_first(policy))
    licence, sources, tags = _base_licence(policy), _data_sources(policy), policy.version.tags
    is_identifier = licence is not None and _IDENTIFIER.fullmatch(licence)
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["rlhf", policy.trained_by],
            base_model=first_base[0] if first_base[1] else None,
            license=licence if is_identifier else None,
        ),
        template_path=str(_TEMPLATE),
        code=_code,
        config=policy.config,
        name=policy.name,
        version=policy.version.version,
        trained_by=policy.trained_by,
        base=base,
        first_base=first_base[0],
        weights=policy.weights,
        left_out=_first(policy).metrics("sft"),
        artifacts=[
            (stage, tags[f"rlhf.{stage}.key"], tags[f"rlhf.{stage}.digest"][:16])
            for stage in STAGES
            if f"rlhf.{stage}.key" in tags
        ],
        has_adapter=policy.files.adapter is not None,
        sources=sources,
        evaluation=evaluation,
        judge=_judge(evaluation),
        own=own,
        prompts=_prompts(evaluation, own),
        confidence=f"{evaluation.get('confidence', 0.95):.0%}",
        results=list(_results(evaluation, own, policy.trained_by)),
        promotion=tags["rlhf.gate_reason"] if tags.get("rlhf.gate") in _OF_NUMBERS else "",
        base_licence=licence,
        # Each data set once, although several fields can use it.
        data_licences={name: _data_licence(digest) for _, name, digest in sources},
        problems=endless_models(evaluation.get("eos_rate", {}), titles),
    )
    return scrubbed(str(card)) + "\n"


def _judge(evaluation: Mapping[str, Any]) -> str:
    judge = str(evaluation.get("judge")).replace("_", " ")
    if "language_model" in evaluation:
        judge += f" {_code(evaluation['language_model']['name'])}"
    return judge


def _prompts(evaluation: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    pairs = sum(own.get("verdicts", {}).values())
    return units(pairs, evaluation.get("prompts", 0), "held-out prompts")


def _results(
    evaluation: Mapping[str, Any], own: Mapping[str, Any], trained_by: PolicyStage
) -> Iterator[tuple[str, str, str]]:
    """Yield measure, value and interval of each result on held-out prompts. `own` are those of the policy."""
    if not evaluation:
        return
    rates = {"win rate over the SFT model": own["win_rate"]}
    if controlled := own.get("win_rate_length_controlled"):
        remark = ""
        if "identified" in controlled:
            remark = f" ({NOT_IDENTIFIED})"
        rates[f"the same, length-controlled{remark}"] = controlled
    if chosen := evaluation.get("over_chosen"):
        rates["win rate over the data's answers"] = chosen["win_rate"][trained_by]
    for name, each in rates.items():
        yield name, f"{each['mean']:.3f}", _interval(each)
    for name in MEASURES:
        values = (evaluation.get(name) or {}).get(trained_by)
        if values:
            yield name.replace("_", " "), f"{values['mean']:.4g}", _interval(values)
    for name, found in regression_differences(evaluation.get("regression", {}), trained_by).items():
        state = "failed" if failed_sets({name: found}) else "passed"
        yield f"regression set {name}, change ({state})", f"{found['mean']:+.4g}", _interval(found)
    if kl := own.get("kl"):
        yield "KL to the SFT model", f"{kl['mean']:.4g}", _interval(kl)


def _base_licence(policy: RegisteredPolicy) -> str | None:
    """Return the licence of the first base model by its model card; None without one, or if the versions
    do not lead to a base model. The card of a hub model is that of its commit in the local cache.
    """
    first = _first(policy)
    model = first.config["model"]
    if first.base_reference is not None or not model.get("path"):
        return None
    digest = _base_digest(first)
    if digest.startswith("hub:"):
        name, _, revision = digest.removeprefix("hub:").rpartition("@")
        card = cached_card(name, revision)
    else:
        card = Path(model["path"], "README.md")
    if card is None or not card.is_file():
        return None
    return licence_of(card)


def _first(policy: RegisteredVersion) -> RegisteredVersion:
    """Return the first one of the versions that were each other's base models, as far as they are known."""
    while policy.base is not None:
        policy = policy.base
    return policy


def licence_of(card: Path) -> str | None:
    """Return the licence in the front matter of a card, or several with commas; None if it has none.

    Other people have written it, so that what is no identifier counts as none.
    """
    from huggingface_hub.repocard import metadata_load

    try:
        found = (metadata_load(card) or {}).get("license")
    except (ValueError, YAMLError, RecursionError):
        return None
    names = [str(each) for each in (found if isinstance(found, list) else [found])]
    if found in (None, "", "unknown") or not all(map(_IDENTIFIER.fullmatch, names)):
        return None
    return ", ".join(names) or None


def _base_digest(policy: RegisteredVersion) -> str:
    """Return the digest of the base model (`hub:NAME@COMMIT` for a hub model); empty if it is not known."""
    sources = _json(policy, "data", "data_card.json").get("sources", [])
    return next((str(source.get("digest")) for source in sources if source.get("field") == "model"), "")


def _base(policy: RegisteredVersion) -> tuple[str, bool]:
    """Return the name of the base model without folders, and whether it is an id on the hub."""
    reference = policy.base_reference
    if reference is not None:
        place, _, rest = reference.partition("://")
        name, number = rest.split("/", 2)[:2]
        if place == "registry":
            return f"{name} version {number}", False
        return f"artifact {name}/{number}", False
    path = policy.config["model"].get("path")
    if not path:
        return "a model from scratch", False
    digest = _base_digest(policy)
    # The digest identifies it on every machine. A folder can be missing here, and look like an id.
    if digest.startswith("hub:") or (not digest and is_hub_model(path)):
        return path, True
    return _last_part(path), False


def _last_part(address: str) -> str:
    """Return the name of a file, folder or object. Its folder or bucket is not published."""
    return address.rstrip("/").rsplit("/", 1)[-1]


def _data_sources(policy: RegisteredPolicy) -> list[tuple[str, str, str]]:
    """Return field, name without folders, and digest of each source of data."""
    found = []
    for source in _json(policy, "data", "data_card.json").get("sources", []):
        if source.get("path"):
            digest = str(source.get("digest", ""))
            name = source["path"] if digest.startswith("hub:") else _last_part(source["path"])
            found.append((str(source["field"]), name, digest))
    return found


def _data_licence(digest: str) -> str | None:
    """Return the licence of a data set by its card in the local cache; None if it is not of the hub."""
    found = _HUB_DATA.match(digest)
    if found is None or (card := cached_card(found["name"], found["commit"], "dataset")) is None:
        return None
    return licence_of(card)


def _json(policy: RegisteredVersion, stage: Any, name: str) -> dict[str, Any]:
    """Return a file of an artifact of the version; empty if the artifact is gone."""
    try:
        folder = policy.stage(stage)
    except InputError:
        return {}
    if folder is None or not (folder / name).is_file():
        return {}
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _interval(values: Mapping[str, float]) -> str:
    return f"[{values['low']:.4g}, {values['high']:.4g}]"


def _code(text: str) -> str:
    """Return text from a configuration as inline code, so that it cannot be markup."""
    return "`" + str(text).replace("`", "'").replace("|", "/").replace("\n", " ") + "`"
