"""`rlhf publish`: a registered policy in Hugging Face layout, with a model card made from its lineage.

publish         to a folder
publish_to_hub  to a repository of the Hugging Face hub
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.address import is_hub_model
from rlhf_core.config.redact import scrubbed
from rlhf_core.config.register import PolicyStage
from rlhf_core.data.hub import cached_card
from rlhf_core.errors import InputError
from rlhf_core.evaluation.measures import MEASURES, NOT_IDENTIFIED, endless_models
from rlhf_core.evaluation.policy_results import evaluation_of
from rlhf_core.evaluation.statistics import failed_sets, regression_differences, units
from rlhf_core.pipeline import STAGES
from rlhf_core.run.registered_policies import RegisteredPolicy, RegisteredVersion
from rlhf_core.storage.bundles import hash_file, is_weights, weights_sha256
from rlhf_core.system.files import TEMPORARY, write_atomic
from rlhf_core.system.held_folders import delete_abandoned, held

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", re.MULTILINE | re.DOTALL)
_LICENSE = re.compile(r"^license:[ \t]*[\"']?([\w.-]+)", re.MULTILINE)
_LICENSES = re.compile(r"^license:[ \t]*\n((?:[ \t]*-[ \t]*[\w.-]+[ \t]*\n)+)", re.MULTILINE)
_HUB_DATA = re.compile(r"hub:(?P<name>.+?)@(?P<commit>[^:]+):")
"""Digest of a data set of the hub, with its split."""
_WEIGHTS, _ARTIFACTS = "Weights: sha256 `", "| stage | key | digest |"
"""Parts of every card that `publish` has written. The block at its beginning can be edited on the hub."""
_CARD = "README.md"
_UNFINISHED = f"{TEMPORARY}publish-"
"""Prefix of the names of folders that `publish` has not finished."""
_UNKNOWN = "unknown"
_OF_NUMBERS = ("first", "match", "away", "judge", "min_prompts", "min_win_rate")
"""Rules whose reason consists of numbers. Others can contain messages of errors, and paths in them."""


def publish(policy: RegisteredPolicy, folder: Path) -> Path:
    """Write the model and `README.md` to `folder`, which appears when complete.

    An adapter is part of the model's weights. It is not copied, because its base model is not published. If
    the folder has an earlier copy of the same policy, only its card is written again. What a killed process
    has left next to the folder is deleted.

    Raises InputError if the folder exists and has other files than an earlier copy of the same policy, is a
    file or a link, or cannot be written.
    """
    if folder.is_symlink():
        raise InputError(f"{folder} is a link; name a folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder")
    try:
        if folder.exists() and any(folder.iterdir()):
            different = _different_files(policy, folder)
            if different:
                names = ", ".join(different[:5])
                raise InputError(
                    f"{folder} exists, and {len(different)} of its files differ from those of this policy:"
                    f" {names}; name another folder, or delete this one"
                )
            write_atomic(folder / _CARD, model_card(policy))
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        delete_abandoned(folder.parent, f"{_UNFINISHED}*")
        temporary = folder.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
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


def _different_files(policy: RegisteredPolicy, folder: Path) -> list[str]:
    """Return the files of a folder that the policy lacks, that it lacks itself, or with other content, and
    its links.

    The card, which is written again, and hidden files are not compared.
    """
    source = policy.folder / "policy"
    names, found = _compared_names(source), _compared_names(folder)
    different = (names ^ found) | {name for name in found if (folder / name).is_symlink()}
    if different:
        return sorted(different)
    # The digest of the registered weights is known, so those of the folder alone are read.
    if weights_sha256(folder) != policy.weights:
        return sorted(filter(is_weights, names))
    small = sorted(name for name in names if not is_weights(name))
    return [name for name in small if hash_file(source / name) != hash_file(folder / name)]


def _compared_names(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder) for path in paths)
    return {str(name) for name in names if str(name) != _CARD and not str(name).startswith(".")}


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
        replace: Whether a repository with other files is used whose card `publish` has not written.

    Raises:
        InputError: The name is not one of a repository, or the hub refuses or cannot be reached, or the
            repository has files of others.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    api = HfApi()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as temporary:
        folder = Path(temporary, "model")
        # Links, so that a kill leaves no copy of the weights.
        source = (policy.folder / "policy").absolute()
        shutil.copytree(source, folder, copy_function=os.symlink)
        write_atomic(folder / _CARD, model_card(policy))
        try:
            private: bool | None = True
            try:
                private = api.repo_info(repository).private
            except RepositoryNotFoundError:
                api.create_repo(repository, private=True)
            else:
                if not replace:
                    _require_own(api, repository, Path(temporary, "card"))
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=f"{policy.name}, version {policy.version.version}, weights {policy.weights}",
                delete_patterns="*",  # files of an earlier version, such as further shards
            )
        except (httpx2.HTTPError, OSError, HFValidationError) as error:  # OSError: the offline mode
            raise InputError(f"{repository} cannot be written on the hub: {error}") from error
    return OnHub(commit.commit_url, private)


def _require_own(api: HfApi, repository: str, folder: Path) -> None:
    """Raise InputError if a repository has files, and a card that `publish` has not written."""
    files = [name for name in api.list_repo_files(repository) if name != ".gitattributes"]
    if not files:
        return
    if "README.md" in files:
        card = Path(api.hf_hub_download(repository, "README.md", local_dir=folder))
        text = card.read_text(encoding="utf-8", errors="replace")
        if _WEIGHTS in text and _ARTIFACTS in text:
            return
    raise InputError(
        f"{repository} exists with {len(files)} files, and `rlhf publish` has not written its card: an upload"
        " deletes all of them; name another repository, or use --replace"
    )


def model_card(policy: RegisteredPolicy) -> str:
    """Return the model card, in Markdown."""
    evaluation = _json(policy, "evaluate", "evaluation.json")
    if evaluation:
        evaluation = evaluation_of(evaluation, policy.trained_by)
    parts = [
        _front_matter(policy),
        f"# {policy.name}, version {policy.version.version}",
        _origin(policy),
        "## Data\n\n" + _data(policy),
        "## Evaluation\n\n" + _evaluation(policy, evaluation),
        "## Licences\n\n" + _licences(policy),
        "## Limits\n\n" + _limits(evaluation, policy.trained_by),
    ]
    return scrubbed("\n\n".join(parts)) + "\n"


def _front_matter(policy: RegisteredPolicy) -> str:
    base, on_hub = _base(_first(policy))
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    lines.append(f"tags: [rlhf, {policy.trained_by}]")
    if on_hub:
        lines.append(f"base_model: {json.dumps(base)}")
    licence = _base_licence(policy)
    if re.fullmatch(r"[\w.-]+", licence) and licence != _UNKNOWN:
        lines.append(f"license: {licence}")
    return "\n".join([*lines, "---"])


def _base_licence(policy: RegisteredPolicy) -> str:
    """Return the licence of the first base model by its model card; "unknown" without one, or if the versions
    do not lead to a base model. The card of a hub model is that of its commit in the local cache.
    """
    first = _first(policy)
    model = first.config["model"]
    if first.base_reference is not None or not model.get("path"):
        return _UNKNOWN
    digest = _base_digest(first)
    if digest.startswith("hub:"):
        name, _, revision = digest.removeprefix("hub:").rpartition("@")
        card = cached_card(name, revision)
    else:
        card = Path(model["path"], "README.md")
    return _UNKNOWN if card is None or not card.is_file() else licence_of(card)


def _first(policy: RegisteredVersion) -> RegisteredVersion:
    """Return the first one of the versions that were each other's base models, as far as they are known."""
    while policy.base is not None:
        policy = policy.base
    return policy


def licence_of(card: Path) -> str:
    """Return the licence in the front matter of a card, or several with commas; "unknown" if it has none."""
    front_matter = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace"))
    if front_matter is None:
        return _UNKNOWN
    if several := _LICENSES.search(front_matter.group(1)):
        return ", ".join(re.findall(r"[\w.][\w.-]*", several.group(1)))
    found = _LICENSE.search(front_matter.group(1))
    return found.group(1) if found else _UNKNOWN


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
        return (f"{name} version {number}" if place == "registry" else f"artifact {name}/{number}"), False
    path = policy.config["model"].get("path")
    if not path:
        return "a model from scratch", False
    digest = _base_digest(policy)
    # The digest identifies it on every machine. A folder can be missing here, and look like an id.
    on_hub = digest.startswith("hub:") if digest else is_hub_model(path)
    return path if on_hub else _last_part(path), on_hub


def _last_part(address: str) -> str:
    """Return the name of a file, folder or object. Its folder or bucket is not published."""
    return address.rstrip("/").rsplit("/", 1)[-1]


def _reward_model(config: Mapping[str, Any]) -> str:
    """Return the part of the sentence about training that names the reward model."""
    if not config["enabled"]:
        return ""
    ensemble = config.get("ensemble")
    return f", {ensemble['members']} reward models" if ensemble else ", a reward model"


def _training(policy: RegisteredPolicy) -> str:
    """Return the part of the sentence about training that comes after supervised fine-tuning."""
    config = policy.config
    seed = config["run"]["seed"]
    if policy.trained_by == "dpo":
        dpo = config["dpo"]
        return f" and DPO (beta {dpo['beta']:g}, epochs: at most {dpo['epochs']}, seed {seed})."
    ppo = config["ppo"]
    return (
        f"{_reward_model(config['reward'])} and PPO (`{ppo['algorithm']}`, at most {ppo['steps']} steps, seed"
        f" {seed})."
    )


def _origin(policy: RegisteredPolicy) -> str:
    """Return the section of the model card about base model, artifacts and training."""
    tags, model = policy.version.tags, policy.config["model"]
    base, first = _base(policy)[0], _base(_first(policy))[0]
    origin = "" if first == base else f" (which goes back to {_code(first)})"
    rows = [_ARTIFACTS, "|---|---|---|"]
    for stage in STAGES:
        if f"rlhf.{stage}.key" in tags:
            rows.append(
                f"| {stage} | `{tags[f'rlhf.{stage}.key']}` | `{tags[f'rlhf.{stage}.digest'][:16]}` |"
            )
    revision = f" at {_code(model['revision'])}" if model.get("revision") else ""
    lines = [
        f"Base model: {_code(base)}{revision}{origin}, then supervised fine-tuning{_training(policy)}",
        f"{_WEIGHTS}{policy.weights}`.",
        "\n".join(rows),
    ]
    ppo = policy.config["ppo"]
    # A version of an earlier release has no field `publish`.
    if policy.trained_by == "ppo" and ppo.get("publish") == "average":
        lines.append(
            "The weights are a moving average over the optimizer steps of PPO, with a decay of"
            f" {ppo['ema_decay']:g} per step (`ppo.publish: average`). They are not those of the last step."
        )
    if policy.files.adapter is not None:
        dtype = policy.config["ppo"]["engine"]["dtype"]
        lines.append(
            f"The evaluation used the SFT model with a separate adapter, in `{dtype}`. These files are their"
            " sum in float32. Load them in float32, because rounding loses a part of the adapter."
        )
    return "\n\n".join(lines)


def _data(policy: RegisteredPolicy) -> str:
    rows = ["| use | source | digest |", "|---|---|---|"]
    for field, name, digest in _data_sources(policy):
        rows.append(f"| {field} | {_code(name)} | {_code(digest[:24])} |")
    return "\n".join(rows) if len(rows) > 2 else "The data artifact is not in the store any more."


def _data_sources(policy: RegisteredPolicy) -> list[tuple[str, str, str]]:
    """Return field, name without folders, and digest of each source of data."""
    found = []
    for source in _json(policy, "data", "data_card.json").get("sources", []):
        if source.get("path"):
            digest = str(source.get("digest", ""))
            name = source["path"] if digest.startswith("hub:") else _last_part(source["path"])
            found.append((str(source["field"]), name, digest))
    return found


def _data_licence(digest: str) -> str:
    """Return the licence of a data set by its card in the local cache; "unknown" if it is not of the hub."""
    found = _HUB_DATA.match(digest)
    card = cached_card(found["name"], found["commit"], "dataset") if found else None
    return _UNKNOWN if card is None else licence_of(card)


def _evaluation(policy: RegisteredPolicy, evaluation: Mapping[str, Any]) -> str:
    """Return the section of the model card about the evaluation on held-out prompts."""
    if not evaluation:
        return "The evaluation is not in the store any more."
    rate, verdicts = evaluation["win_rate"], evaluation["verdicts"]
    confidence = f"{evaluation.get('confidence', 0.95):.0%}"
    judge = str(evaluation.get("judge")).replace("_", " ")
    if "language_model" in evaluation:
        judge += f" {_code(evaluation['language_model']['name'])}"
    rows = [f"| measure | policy | {confidence} interval |", "|---|---|---|"]
    rates = {"win rate over the SFT model": rate}
    if controlled := evaluation.get("win_rate_length_controlled"):
        remark = f" ({NOT_IDENTIFIED})" if "identified" in controlled else ""
        rates[f"the same, length-controlled{remark}"] = controlled
    if chosen := evaluation.get("over_chosen"):
        rates["win rate over the data's answers"] = chosen["win_rate"]["policy"]
    rows += [f"| {name} | {each['mean']:.3f} | {_interval(each)} |" for name, each in rates.items()]
    for name in MEASURES:
        values = (evaluation.get(name) or {}).get("policy")
        if values:
            rows.append(f"| {name.replace('_', ' ')} | {values['mean']:.4g} | {_interval(values)} |")
    for name, found in regression_differences(evaluation.get("regression", {})).items():
        rows.append(_regression_row(name, found))
    kl = evaluation.get("kl_interval")
    if kl:
        rows.append(f"| KL to the SFT model | {kl['mean']:.4g} | {_interval(kl)} |")
    prompts = units(sum(verdicts.values()), evaluation.get("prompts", 0), "held-out prompts")
    text = (
        f"Judge: {judge}, on {prompts}"
        f" ({verdicts['wins']} won, {verdicts['losses']} lost, {verdicts['ties']} tied).\n\n"
    )
    text += "\n".join(rows)
    tags = policy.version.tags
    if tags.get("rlhf.gate") in _OF_NUMBERS:
        return f"{text}\n\nPromotion: {tags['rlhf.gate_reason']}."
    return text


def _regression_row(name: str, found: Mapping[str, Any]) -> str:
    """Return a regression set: the change from the SFT model, and whether the policy is worse."""
    state = "failed" if failed_sets({name: found}) else "passed"
    return f"| regression set {name}, change ({state}) | {found['mean']:+.4g} | {_interval(found)} |"


def _licences(policy: RegisteredPolicy) -> str:
    # Each data set once, although several fields can use it.
    of_data = {name: _data_licence(digest) for _, name, digest in _data_sources(policy)}
    lines = [f"- Base model: {_base_licence(policy)}"]
    lines += [f"- Data {_code(name)}: {licence}" for name, licence in of_data.items()]
    if not of_data:
        lines.append(f"- Data: {_UNKNOWN}")
    text = (
        "\n".join(lines) + "\n\nThe licence of this model follows from those of the base model and the data."
    )
    if _UNKNOWN in of_data.values() or not of_data:
        text += " Ask the owners of data whose licence is unknown."
    return text


def _limits(evaluation: Mapping[str, Any], trained_by: PolicyStage) -> str:
    lines = [
        "- The evaluation is about prompts like the held-out ones. Other languages, topics and longer"
        " conversations were not tested, and neither were safety and facts.",
        "- Intervals are over prompts. They do not include the variation between training seeds.",
    ]
    lines += [f"- **{problem}.**" for problem in endless_models(evaluation.get("eos_rate", {}))]
    if evaluation.get("judge_trained_on"):
        # The reward model judges a policy of DPO that was trained with the same pairs.
        what = "with the pairs of the judge" if trained_by == "dpo" else "on the judge"
        lines.append(f"- **The policy was trained {what}**, so that its win rate is too high.")
    return "\n".join(lines)


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
