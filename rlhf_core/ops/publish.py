"""`rlhf publish`: a registered policy in Hugging Face layout, with a model card made from its lineage.

publish         to a folder
publish_to_hub  to a repository of the Hugging Face hub
model_card      the text of the card, from the template `card.md.j2`
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from yaml import YAMLError

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.redact import scrubbed
from rlhf_core.data.hub import cached_card
from rlhf_core.errors import InputError
from rlhf_core.evaluation.measures import MEASURES, NOT_IDENTIFIED, endless_models, results_of, titles_of
from rlhf_core.evaluation.statistics import failed_sets, regression_differences, units
from rlhf_core.pipeline import STAGES, PolicyStage
from rlhf_core.run.registered_policies import RegisteredPolicy, RegisteredVersion
from rlhf_core.system.files import TEMPORARY, delete_abandoned, held, write_atomic

log = logging.getLogger(__name__)

_CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.j2")
_HUB_DATA = re.compile(r"hub:(?P<name>.+?)@(?P<commit>[^:]+):")
"""Digest of a data set of the hub, with its split."""
_IDENTIFIER = re.compile(r"[\w.-]+")
_OF_NUMBERS = ("first", "match", "away", "judge", "min_prompts", "min_win_rate")
"""Rules whose reason consists of numbers. Others can contain messages of errors, and paths in them."""
_UNFINISHED = f"{TEMPORARY}publish-"
"""Prefix of the names of folders that `publish` has not finished."""


def publish(policy: RegisteredPolicy, folder: Path) -> Path:
    """Write the model and `README.md` to `folder`, which appears when complete.

    An adapter is part of the model's weights. It is not copied, because its base model is not published. What
    a killed process has left next to the folder is deleted.

    Raises InputError if the folder has files, is a file or a link itself, or cannot be written.
    """
    if folder.is_symlink():
        raise InputError(f"{folder} is a link; name a folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} has files already; name another folder, or delete this one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
        # Otherwise another `rlhf publish` to the same parent takes this folder for one that a kill has left.
        with held(temporary):
            _write(policy, folder, temporary)
    except OSError as error:
        # `copytree` lists its errors as tuples of source, target and reason.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise InputError(
            f"{folder} cannot be written ({why}); free space there, or name another folder"
        ) from error
    finally:
        delete_abandoned(folder.parent, f"{_UNFINISHED}*")
    return folder


def _write(policy: RegisteredPolicy, folder: Path, temporary: Path) -> None:
    try:
        shutil.copytree(policy.folder / "policy", temporary, copy_function=shutil.copyfile)
        (temporary / _CARD).write_text(model_card(policy), encoding="utf-8")
        for path in (temporary, *temporary.rglob("*")):  # artifacts are read-only
            path.chmod(0o755 if path.is_dir() else 0o644)
        # This also replaces an empty folder.
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class OnHub(NamedTuple):
    """What `publish_to_hub` made."""

    address: str
    """URL of the commit."""
    private: bool | None
    """Whether only its owner can read the repository. None if the hub does not say."""


def publish_to_hub(policy: RegisteredPolicy, repository: str, *, replace: bool = False) -> OnHub:
    """Upload the model and its card to a repository of the hub, which is made private if it is new. All other
    files of the repository are deleted.

    The token is that of `hf auth login` or HF_TOKEN; HF_ENDPOINT names another hub.

    Args:
        policy: The policy.
        repository: `owner/name`.
        replace: Whether the files of a repository that has some are deleted.

    Raises:
        InputError: The name is not one of a repository, or the hub refuses or cannot be reached, or the
            repository has files.
    """
    # huggingface_hub 2.4 sends its requests with httpx2, whose errors are no subclasses of httpx's.
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    api = HfApi()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as temporary:
        folder = Path(temporary, "model")
        # Links, so that a kill leaves no copy of the weights.
        # Absolute, because a relative link starts at the folder of the link.
        source = (policy.folder / "policy").absolute()
        shutil.copytree(source, folder, copy_function=os.symlink)
        # Replaces a link of this name. Writing through it would change the file of the artifact.
        write_atomic(folder / _CARD, model_card(policy))
        try:
            private: bool | None = True
            try:
                private = api.repo_info(repository).private
            except RepositoryNotFoundError:
                api.create_repo(repository, private=True)
            else:
                # The hub puts this file into each new repository, and no upload deletes it.
                files = [name for name in api.list_repo_files(repository) if name != ".gitattributes"]
                if files and not replace:
                    raise InputError(
                        f"{repository} exists with {len(files)} files, and an upload deletes all of them;"
                        " name another repository, or use --replace"
                    )
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=f"{policy.name}, version {policy.version.version}, weights {policy.weights}",
                delete_patterns="*",  # files of an earlier version, such as further shards
            )
        except (httpx2.HTTPError, OSError, HFValidationError) as error:  # OSError: the offline mode
            raise InputError(f"{repository} cannot be written on the hub: {error}") from error
    return OnHub(commit.commit_url, private)


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
        artifacts=_artifacts(tags),
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
    # Texts of the configuration and of the gate are in it, and it can become public.
    return scrubbed(str(card)) + "\n"


def _artifacts(tags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return stage, key and the beginning of the digest of each artifact behind a version."""
    found: list[tuple[str, str, str]] = []
    for stage in STAGES:
        if key := tags.get(f"rlhf.{stage}.key"):
            found.append((stage, key, tags[f"rlhf.{stage}.digest"][:16]))
    return found


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
    # RecursionError: front matter with deeply nested lists.
    except (ValueError, YAMLError, RecursionError):
        return None
    names = list(map(str, found if isinstance(found, list) else [found]))
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
