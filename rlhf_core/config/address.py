"""Addresses of data sources and models: the demo task, local paths, objects in a bucket, and hub ids.

`owner/name` can be a folder or a repository of the Hugging Face hub. `parse_address` decides which, for every
part of the pipeline: preflight, stage keys, the data stage and the loading of models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
