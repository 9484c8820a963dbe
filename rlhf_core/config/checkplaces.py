"""Checks of folders, addresses and the environment. The only network connection is to the Ray cluster in
RAY_ADDRESS.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_core.config.checkfiles import Finding, writable
from rlhf_core.config.pipeline import PipelineConfig
from rlhf_core.config.redact import HIDDEN, has_credentials, shown, texts
from rlhf_core.errors import ConfigError

_TRACKERS = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")
_DOORS = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "allows engines to execute received code",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "allows checkpoints to execute code",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "allows models of the registry to execute code",
    "PYTHONOPTIMIZE": "removes checks from the libraries",
}
"""Environment variables that disable a guarantee of SECURITY.md, and the effect of each."""


def check_places(config: PipelineConfig) -> Iterator[Finding]:
    """Addresses of the wrong form or with credentials in them, and folders that cannot be made or written."""
    for path, text in texts(config.model_dump(mode="json", by_alias=True)):
        if has_credentials(text):
            yield ConfigError(
                f"{'.'.join(map(str, path))}: credentials in a URL are refused; got {HIDDEN}; "
                "give them by environment variables or a role"
            )
    yield from _store(config)
    # if neither is set, the database is in run.home, which is checked below
    given = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if given and (problem := tracker_problem(given)):
        yield ConfigError(f"tracking.uri (or MLFLOW_TRACKING_URI): {problem}")
    places = {"run.home": config.run.home}
    if "://" not in config.store_url or config.store_url.startswith("file://"):
        places["store.url"] = config.store_url.removeprefix("file://")
    for field, folder in places.items():
        problem = home_problem(Path(folder)) if field == "run.home" else writable(Path(folder))
        if problem:
            yield ConfigError(
                f"{field}: the folder {shown(folder, limit=200)} cannot be used: {problem}; choose another"
            )


def _store(config: PipelineConfig) -> Iterator[Finding]:
    url, endpoint = config.store.url, config.store.endpoint
    if url is not None and url.startswith("s3://"):
        bucket = url.removeprefix("s3://").split("/")[0]
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            yield ConfigError(
                "store.url: must be s3://bucket/prefix with a bucket name of 3 to 63 a-z, 0-9, `.` and `-`; "
                f"got {shown(url)}; name a bucket"
            )
    elif url is not None and "://" in url and not url.startswith("file://"):
        yield ConfigError(
            "store.url: must be a folder, file:// or s3://bucket/prefix; got scheme"
            f" {url.split('://')[0][:20]}://; use s3://"
        )
    if endpoint is not None and not re.match(r"https?://[^/\s]+", endpoint):
        yield ConfigError(
            f"store.endpoint: must be http(s)://host:port; got {shown(endpoint)}; add the scheme and host"
        )


def home_problem(folder: Path) -> str | None:
    """Return the reason for which `folder` cannot be used as `run.home`, or None.

    The folder contains databases that MLflow and Prefect address by URL. The characters `#`, `%` and `?`
    would change such a URL, so that it names a different file.
    """
    if problem := writable(folder):
        return problem
    signs = [sign for sign in "#%?" if sign in str(folder.absolute())]
    return (
        f"its absolute path has {' and '.join(signs)}, which have a special meaning in URLs of databases"
        if signs
        else None
    )


def tracker_problem(uri: str) -> str | None:
    """Why `uri` cannot be MLflow's, with a fix, or None."""
    scheme, separator, rest = uri.partition("://")
    kind = scheme.split("+")[0]
    if not separator or kind not in _TRACKERS:
        got = f"scheme {scheme[:20]}://" if separator else shown(uri)
        return (
            f"must begin with one of {', '.join(_TRACKERS)}; got {got}; use http://host:port or"
            " sqlite:///path/of/a/file.db"
        )
    if kind == "sqlite" and (
        len(rest) < 2 or not rest.startswith("/") or any(sign in rest for sign in "#%?")
    ):
        return f"must be sqlite:///path/of/a/file.db; got {shown(uri)}; name the file"
    if kind != "sqlite" and not rest.strip("/"):
        return f"must name a host; got {shown(uri)}; use http://host:port"
    return None


def check_environment(config: PipelineConfig) -> Iterator[Finding]:
    """Variables that cannot be used, or that open what is closed by default."""
    environ = os.environ
    uri, endpoint = environ.get("MLFLOW_TRACKING_URI"), environ.get("AWS_ENDPOINT_URL_S3")
    if uri and config.tracking.uri is None and (problem := tracker_problem(uri)):
        yield ConfigError(f"MLFLOW_TRACKING_URI: {problem}")
    yield from _tracker(environ)
    if endpoint and has_credentials(endpoint):
        yield ConfigError(
            f"AWS_ENDPOINT_URL_S3: credentials in a URL are refused; got {HIDDEN}; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or use a role"
        )
    elif endpoint and not re.match(r"https?://[^/\s]+", endpoint):
        yield ConfigError(
            f"AWS_ENDPOINT_URL_S3: must be http(s)://host:port; got {shown(endpoint)}; add the scheme and"
            " host"
        )
    for name in ("TMPDIR", "RAY_TMPDIR"):
        folder = environ.get(name)
        if folder and os.path.exists(folder) and (problem := writable(Path(folder))):
            yield ConfigError(
                f"{name}: {shown(folder, limit=200)} cannot be used: {problem}; choose another folder"
            )
    yield from _ray(environ)
    faults = environ.get("RLHF_FAIL")
    if faults and not all(re.fullmatch(r"[\w.]+:\d+:\w+", fault) for fault in faults.split(",")):
        yield ConfigError(
            f"RLHF_FAIL: must be name:nth:action, several by commas; got {shown(faults)}; correct or unset it"
        )
    for name, what in _DOORS.items():
        if environ.get(name, "").lower() not in ("", "0", "false") or (
            name == "PYTHONOPTIMIZE" and sys.flags.optimize
        ):
            yield ConfigError(f"{name}: {what}; got {shown(environ.get(name, 'python -O'))}; unset it")
    if environ.get("RAY_AUTH_MODE", "token").lower() != "token" and not environ.get("RAY_ADDRESS"):
        yield ConfigError(
            "RAY_AUTH_MODE: must be token where Ray runs on this machine; got"
            f" {shown(environ['RAY_AUTH_MODE'])}; unset it"
        )


def _tracker(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check variables of MLflow's client that would make every call fail. Otherwise only `register` would
    fail, at the end.
    """
    token = environ.get("MLFLOW_TRACKING_TOKEN", "")
    if token and not (token.isascii() and token.isprintable() and token == token.strip()):
        yield ConfigError(
            "MLFLOW_TRACKING_TOKEN: must be printable ASCII characters without blanks or line breaks around"
            f" them; got {HIDDEN}; take them off (a file read into a variable keeps its last line break in"
            " some shells)"
        )
    for name, low, high in (
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", 1, 3600),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", 0, 10),
    ):
        value = environ.get(name)
        if value is not None and not (re.fullmatch("[0-9]{1,4}", value) and low <= int(value) <= high):
            yield ConfigError(
                f"{name}: must be a whole number from {low} to {high}; got {shown(value)}; correct or"
                " unset it"
            )


_RAY_SECONDS = 5.0


def _ray(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check whether a server answers at RAY_ADDRESS. Otherwise the error would only appear when PPO starts,
    after hours.
    """
    address = environ.get("RAY_ADDRESS")
    if not address:
        return
    found = re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[\w.-]+):(\d{1,5})", address)
    if found is None:
        yield ConfigError(
            f"RAY_ADDRESS: must be host:port of a running cluster's head; got {shown(address)}; give it (`ray"
            " status` shows it), or unset it to start Ray on this machine"
        )
        return
    try:
        with socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=_RAY_SECONDS):
            return
    except (OSError, ValueError, OverflowError) as error:
        yield ConfigError(
            f"RAY_ADDRESS: no Ray cluster answers at {shown(address)} ({error}); start it, or unset it to"
            " start Ray on this machine"
        )
