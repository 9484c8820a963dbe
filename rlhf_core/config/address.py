"""Addresses of data sources and models: the demo task, local paths, objects in a bucket, and hub ids.

`owner/name` can be a folder or a repository of the Hugging Face hub. `parse_address` decides which, for every
part of the pipeline: preflight, stage keys, the data stage and the loading of models. `base_of` says which
model from outside the pipeline a stage reads: that of `model.path`, `reward.judge.path` or
`ppo.teacher.path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.pipeline import StageName
from rlhf_core.system.files import exists

AddressKind = Literal["synthetic", "local", "s3", "hub", "url"]
DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
"""Suffixes of the data files that can be read."""

_REFERENCES = ("champion:", "registry://", "artifact://")
_PATH_PREFIXES = ("/", "./", "../", "~", "file://")
_S3_OBJECT = re.compile(r"s3://[^/]+/.")
# At most 96 characters in each part, as `validate_repo_id` of huggingface_hub has it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


@dataclass(frozen=True)
class Address:
    """An address and its kind. A `url` has a scheme that cannot be read, such as https://."""

    kind: AddressKind
    text: str
    """The address as written in the configuration."""

    @property
    def path(self) -> Path:
        """Path of a local address."""
        return Path(self.text.removeprefix("file://"))

    @property
    def looks_like_path(self) -> bool:
        """Whether the text has the form of a path, so that it is local even if nothing exists there."""
        return self.text.startswith(_PATH_PREFIXES) or self.text.lower().endswith(
            (*DATA_SUFFIXES, ".txt", ".gz")
        )


def is_reference(text: str) -> bool:
    """Return whether `text` refers to what an earlier run made; see `rlhf_core.run.references`."""
    return text.startswith(_REFERENCES)


def parse_address(text: str) -> Address:
    """Return the address that `text` names.

    A text with the form of a path is local, even if the path does not exist. An existing path is local, even
    if it has the form of a hub id. A text that is neither a path nor a hub id is a local path that does not
    exist.
    """
    if text == "synthetic":
        return Address("synthetic", text)
    if text.startswith("s3://"):
        return Address("s3", text)
    if "://" in text and not text.startswith("file://"):
        return Address("url", text)
    local = Address("local", text)
    # transformers and datasets prefer an existing folder to a repository of the same name, too.
    if local.looks_like_path or exists(text) or _HUB_ID.fullmatch(text) is None:
        return local
    return Address("hub", text)


def s3_problem(text: str) -> str | None:
    """Return the reason for which an S3 address cannot be that of data, with a fix, or None."""
    if _S3_OBJECT.match(text):
        return None
    return f"must be s3://bucket/key; got {text!r}; name the bucket and a key in it"


def is_hub_model(path: str) -> bool:
    """Return whether `model.path` is an id of the Hugging Face hub. Otherwise it is a folder."""
    return parse_address(path).kind == "hub"


MODEL_PATH = "model.path"
JUDGE_PATH = "reward.judge.path"
TEACHER_PATH = "ppo.teacher.path"
BASE_STAGES: tuple[StageName, ...] = ("sft", "judge", "ppo")
"""The stages that read such a model, if it is configured."""


@dataclass(frozen=True)
class BaseModelAddress:
    """Where a base model is."""

    field: str
    """Its field of the configuration."""
    path: str
    """Folder or hub id; a reference in a configuration whose references are not resolved."""
    revision: str | None
    """Commit or branch of a hub id."""

    @property
    def is_hub(self) -> bool:
        return is_hub_model(self.path)

    @property
    def digest_name(self) -> str:
        """Name of its digest among the sources of a stage."""
        return "model" if self.field == MODEL_PATH else self.field

    @property
    def revision_field(self) -> str:
        """Field of `revision`."""
        return self.field.replace(".path", ".revision")

    def unpinned(self) -> Iterator[str]:
        """Yield a warning if it is a hub model without a revision."""
        if self.is_hub and self.revision is None:
            yield (
                f"{self.field}: {self.path} is no local folder, so it is read from the Hugging Face hub; "
                f"pin {self.revision_field} to a commit, or a later run may read another one"
            )


def base_of(config: PipelineConfig, stage: StageName) -> BaseModelAddress | None:
    """Return the model from outside that a stage reads: what it starts from, or the teacher of PPO. None if
    it reads artifacts only, or starts from random weights.
    """
    judge = config.reward.judge
    if stage == "judge" and judge is not None and judge.path is not None:
        return BaseModelAddress(JUDGE_PATH, judge.path, judge.revision)
    if stage == "ppo" and config.ppo.enabled and (teacher := config.ppo.teacher) is not None:
        return BaseModelAddress(TEACHER_PATH, teacher.path, teacher.revision)
    if stage == "sft" and config.model.path is not None:
        return BaseModelAddress(MODEL_PATH, config.model.path, config.model.revision)
    return None


def with_base_paths(config: PipelineConfig, paths: Mapping[str, str]) -> PipelineConfig:
    """Return `config` with other paths of base models, by their fields. Fields without one keep theirs."""
    sections = {MODEL_PATH: config.model, JUDGE_PATH: config.reward.judge, TEACHER_PATH: config.ppo.teacher}
    fields = [field for field, section in sections.items() if section is not None]
    return config.with_values({field: paths[field] for field in fields if field in paths})
