"""Addresses of data sources and models: the demo task, local paths, objects in a bucket, and hub ids.

`owner/name` can be a folder or a repository of the Hugging Face hub. `parse_address` decides which, for every
part of the pipeline: preflight, stage keys, the data stage and the loading of models. `base_of` says which
model from outside the pipeline a stage reads: that of `model.path`, `reward.judge.path` or
`ppo.teacher.path`.

Addresses of servers that are asked over HTTP, as well: reward services, judges, MLflow and S3.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.pipeline import StageName
from rlhf_core.system.files import exists

AddressKind = Literal["synthetic", "local", "s3", "hub", "url"]
DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
"""Suffixes of the data files that can be read."""

_REFERENCES = ("champion:", "registry://", "artifact://")
_PATH_PREFIXES = ("/", "./", "../", "~", "file://")
_S3_OBJECT = re.compile(r"s3://[^/]+/.")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


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


_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)


def url_problem(url: str, token: str = "the variable in api_key_env") -> str | None:
    """Return the reason for which `url` is no plain HTTP address, or None.

    Args:
        url: The address.
        token: Where the token of the service is given, for the message.
    """
    if problem := server_problem(url):
        return problem
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        return f"it must have no user, password, query or fragment; give a token by {token}"
    return None


def server_problem(url: str) -> str | None:
    """Return the reason for which no server can be at `url`, or None."""
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for a text and for numbers above 65535.
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "it must be http(s)://host[:port]/path"
    if not whole or any(char.isspace() or not char.isprintable() for char in url):
        return "it must be http(s)://host[:port]/path"
    return _host_problem(host_of(url))


def _host_problem(host: str) -> str | None:
    """Return the reason for which `host` is neither an address nor an unambiguous host name, or None.

    The name must be interpreted in the same way by every resolver and HTTP client.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return None
    except ValueError:
        pass
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        return (
            "its host must be an address or a name of letters, digits, hyphens and dots (others as xn--...)"
        )
    # Resolvers take `127.1`, `0x7f.1` and `2130706433` for addresses, which `ip_address` above does not.
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
        return "its host must be written as four decimal numbers without leading zeros, such as 127.0.0.1"
    for label in labels:
        if label.startswith("xn--"):
            try:
                label.encode("ascii").decode("idna")
            except UnicodeError:
                return f"its host has the label {label}, which is not a valid name"
    return None


def host_of(url: str) -> str:
    """Return the host of a URL in lower case, without port and brackets."""
    return (urlsplit(url).hostname or "").lower()
