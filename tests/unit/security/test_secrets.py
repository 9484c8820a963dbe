"""Secrets stay where they are.

Rules (the canary through a whole run is in `tests/integration/test_pipeline.py`):
- what a line of a log, a message or an event says is without the values of secret variables and without users
  in URLs, tracebacks included, from any package
- a stage that fails with a secret in its words leaves none in its log and sends none to the flow
- a new home folder is readable by its user alone; spec files hold no variable of the environment
"""

from __future__ import annotations

import html
import json
import logging
import os
import stat
import subprocess
import sys
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from rlhf_cli import main as cli
from rlhf_core.config import PipelineConfig
from rlhf_core.config.redact import (
    HIDDEN,
    ScrubbingFormatter,
    has_credentials,
    is_secret,
    scrubbed,
    shown,
    without_secret_values,
)
from rlhf_core.errors import InfrastructureError
from rlhf_core.executors.child import run_child
from rlhf_core.executors.spec import StageSpec, stage_environment
from rlhf_core.logs import set_up_logging
from rlhf_core.preflight import check_addresses
from rlhf_core.system.home import Home

CANARY = "canary-0f8c1e77d2"

NAMES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PREFECT_API_KEY", "PREFECT_SERVER_API_AUTH_STRING",
    "RLHF_REWARD_TOKEN", "RAY_AUTH_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD",
    "DB_PWD", "MY_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_value_of_a_secret_variable_is_removed(name: str) -> None:
    text = scrubbed(f"403: the key {CANARY!r} is not known ({CANARY})", {name: CANARY})
    assert text == "403: the key '(hidden)' is not known ((hidden))"
    assert is_secret(name, CANARY)


def test_data_is_shown_without_known_values_and_with_what_only_looks_secret() -> None:
    code = 'password = "hunter22"'
    assert without_secret_values([code, f"a {CANARY}."], {"HF_TOKEN": CANARY}) == [code, "a (hidden)."]
    [masked] = without_secret_values([f"a {CANARY}."], {"HF_TOKEN": CANARY}, same_length=True)
    assert masked == f"a {'*' * len(CANARY)}."


LESS_COMMON = (
    "PGPASSWORD", "SSHPASS", "DB_PASS", "MINIO_SECRET_KEY", "MLFLOW_FLASK_SERVER_SECRET_KEY", "OPENAI_KEY",
    "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "SENTRY_DSN", "GPG_PASSPHRASE", "CI_JOB_TOKEN_V2",
)  # fmt: skip


@pytest.mark.parametrize("name", LESS_COMMON)
def test_value_of_a_less_common_secret_variable_is_removed(name: str) -> None:
    assert CANARY not in scrubbed(f"401 for {CANARY}", {name: CANARY})


BY_NAME = (
    "MY_CREDS", "AUTHORIZATION", "PROXY_AUTHORIZATION", "SESSION_COOKIE", "SLACK_WEBHOOK_URL", "TLS_CERT",
    "AZURE_SAS", "CI_JOB_JWT", "HF_HUB_AUTH", "my_creds",
)  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_value_of_a_variable_with_a_secret_name_is_removed(name: str) -> None:
    assert CANARY not in scrubbed(f"401 for {CANARY}", {name: CANARY})


ODD = "can'ary\"0f8c\\1e77 \u00fc+/&<d2"
"""A secret that every encoding spells differently."""

ENCODINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "repr": repr,
    "repr of bytes": lambda secret: repr(secret.encode()),
    "JSON": json.dumps,
    "JSON in UTF-8": lambda secret: json.dumps(secret, ensure_ascii=False),
    "URL": lambda secret: quote(secret, safe=""),
    "path of a URL": quote,
    "form": quote_plus,
    "URL in lower case": lambda secret: quote(secret, safe="").lower(),
    "HTML": html.escape,
    "basic authentication": lambda secret: b64encode(f"user:{secret}".encode()).decode(),
    "basic authentication, another user": lambda secret: b64encode(f"a:{secret}".encode()).decode(),
    "base64": lambda secret: b64encode(secret.encode()).decode(),
    "base64 for URLs": lambda secret: urlsafe_b64encode(f"ab:{secret}:x".encode()).decode(),
}


@pytest.mark.parametrize("form", ENCODINGS)
@pytest.mark.parametrize("secret", [CANARY, ODD, f"{CANARY}/+"])
def test_secret_is_removed_in_every_encoding(form: str, secret: str) -> None:
    written = ENCODINGS[form](secret)
    text = scrubbed(f"403 for <{written}>", {"HF_TOKEN": secret})
    core = written.strip("'\"b=")[8:-4]
    assert core not in text and HIDDEN in text and text.startswith("403 for <")


def test_secret_is_removed_from_a_url_whose_digits_are_in_lower_case() -> None:
    assert scrubbed("at Pa%2fssWord1x", {"MY_TOKEN": "Pa/ssWord1x"}) == f"at {HIDDEN}"


@pytest.mark.parametrize(
    "written", [repr(f"Bearer {CANARY}\n".encode()), f"{CANARY}\n", CANARY, repr(CANARY + "\n")]
)
def test_secret_is_removed_with_and_without_its_newline(written: str) -> None:
    assert CANARY not in scrubbed(f"Illegal header value {written}", {"RLHF_REWARD_TOKEN": f"{CANARY}\n"})


def test_password_with_encoded_percent_signs_is_removed_in_each_form() -> None:
    environ = {"DATABASE_URL": "postgres://u:ab%25ffcd99@h/x"}
    assert scrubbed("failed for ab%ffcd99 and ab%25ffcd99", environ) == "failed for (hidden) and (hidden)"


def test_long_lines_take_linear_time() -> None:
    started = time.process_time()
    scrubbed("x-" * 50_000, {})
    assert time.process_time() - started < 2.0


def test_secret_that_begins_with_another_is_removed_whole() -> None:
    environ = {"A_TOKEN": CANARY, "B_TOKEN": f"{CANARY}-and-more"}
    assert scrubbed(f"got {CANARY}-and-more and {CANARY}", environ) == "got (hidden) and (hidden)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", f"postgresql://me:{CANARY}@db/mlflow"),
        ("PREFECT_API_URL", f"https://me:{CANARY}@prefect.example/api"),
        ("HTTPS_PROXY", f"http://me:%40%2F{CANARY}@proxy:3128"),
        ("MLFLOW_TRACKING_URI", f"http://h:5000/?api_key={CANARY}"),
        ("AZURE_BLOB", f"https://x.blob.core.windows.net/c?sv=1&sig={CANARY}"),
    ],
)
def test_password_of_an_address_is_removed_outside_of_it(name: str, value: str) -> None:
    password = f"@/{CANARY}" if "%40" in value else CANARY
    assert CANARY not in scrubbed(f"authentication failed with {password} at {value}", {name: value})


WITHOUT_A_VARIABLE = (
    "https://{}@host/x", "https://{}:x-oauth-basic@github.com/x.git", "http://h/?token={}", "http://h/?a=1&api_key={}#top",
    "https://b.s3.amazonaws.com/k?X-Amz-Expires=60&X-Amz-Signature={}", "http://h/cb#access_token={}&x=1", "http://h/?%74oken={}",
    "host=db user=me password={} dbname=x", "host=db password='{} x' dbname=x",
    '{{"user": "me", "password": "{}"}}', "Authorization: Bearer {}", "{{'Authorization': 'Basic {}='}}",
    "Bearer {} is not known",
    "Cookie: a=b; session={}; c=d",
    "https://hooks.slack.com/services/T0/B0/{}", "https://discord.com/api/webhooks/1/{}",
    "https:/\\me:{}@host", "//me:{}@host/x",
    "hf_{}", "glpat-{}", "x-api-key: {}", "'X-Auth-Token': '{}'", "AccountName=a;AccountKey={}==;B=c",
    "http://h/?%2574oken={}", "client_secret={}&grant_type=x",
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
)  # fmt: skip


@pytest.mark.parametrize("text", WITHOUT_A_VARIABLE)
def test_known_formats_of_secrets_are_removed(text: str) -> None:
    secret = "canary0f8c1e77d2"
    found = scrubbed(f"cannot reach {text.format(secret)} now, try a@b.example", {})
    assert secret not in found
    assert found.startswith("cannot reach ") and HIDDEN in found


def test_id_of_an_aws_key_is_removed() -> None:
    assert scrubbed("the key AKIAIOSFODNN7EXAMPLE does not exist", {}) == "the key (hidden) does not exist"


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=64 tokens_per_s=1234.5 key=0f8c1e77d2b64aa1 pad_token='<pad>'",
        "basic authentication of the bearer is refused; Basic settings follow",
        "https://h:5000/#/experiments/3/runs/0f8c1e77?workflowType=machine_learning&author=me#note=1",
        "mailto:a@b.example, see https://docs.example/a?page=2 and file:///data/x@y/z",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert scrubbed(text, {"RUN_NAME": "demo"}) == text


CREDENTIALS_IN_URLS = (
    *(f"http://h/?{name}=SECRET" for name in (
        "token", "api_key", "apikey", "api-key", "auth", "sas", "sig", "pwd", "passwd", "password",
        "client_secret", "jwt", "X-Goog-Signature", "X-Amz-Credential", "code", "access_token", "%74oken",
        "a=1&key", "a=1;secret",
        "db_password", "bearer", "otp", "pw", "subscription-key", "%2574oken", "%25252574oken",
    )),
    "http:h?token=SECRET",
    "http://h/#token=SECRET", "http://h/cb#id_token=SECRET", "https://h%3Ftoken=SECRET", "https://SECRET@h", "https://u:SECRET@h",
    "https:/\\u:SECRET@h", "https:\\\\u:SECRET@h", "https:/u:SECRET@h", "//u:SECRET@h", "https://u%3ASECRET%40h",
)  # fmt: skip


@pytest.mark.parametrize("url", CREDENTIALS_IN_URLS)
def test_credentials_in_a_url_are_refused_in_every_spelling(url: str, tmp_path: Path) -> None:
    assert has_credentials(url) and shown(url) == HIDDEN
    config = PipelineConfig.model_validate({"run": {"home": str(tmp_path)}, "tracking": {"uri": url}})
    messages = [str(finding) for finding in check_addresses(config)]
    assert any(message.startswith("tracking.uri: credentials in a URL are refused") for message in messages)
    assert not any("SECRET" in message for message in messages)


@pytest.mark.parametrize(
    "text",
    [
        "http://h:5000/x?page=2&sort_by=author",
        "s3://bucket/a@b/c",
        "Is 3 > 2? token=x; a//b c:d@e",
        "postgresql://h/db",
    ],
)
def test_addresses_without_credentials_are_accepted(text: str) -> None:
    assert not has_credentials(text)


def test_other_variables_and_short_values_are_unchanged() -> None:
    environ = {"RUN_NAME": "demo-run-1", "HF_TOKEN": "true", "AWS_PROFILE": "production"}
    environ |= {
        "TOKENIZERS_PARALLELISM": "production-like",
        "PASSENGERS": "store-and-forward",
        "KEYBOARD": "config/us",
    }
    environ |= {
        "PWD": "/projects/rlhf",
        "OLDPWD": "/projects/old",
    }  # where the command was typed, not a password
    text = "demo-run-1 is true in production; log /projects/rlhf/.rlhf/logs/x.log, not /projects/old"
    assert scrubbed(text, environ) == text


def test_a_number_of_tokens_is_no_secret() -> None:
    environ = {"MAX_BATCH_TOKENS": "131072", "TOKEN_LIMIT": "262144"}
    assert scrubbed("131072 of 262144", environ) == "131072 of 262144"
    secrets = {"API_TOKEN": "131072", "HF_TOKENS": CANARY, "PGPASSWORD": "262144"}
    assert scrubbed(f"131072 {CANARY} 262144", secrets) == f"{HIDDEN} {HIDDEN} {HIDDEN}"


@pytest.mark.parametrize(
    "url",
    [
        "http://user:{}@host:9000/x",
        "postgresql://me:{}@db/mlflow",
        "s3://AKIA:{}/more@bucket",
        "https://:{}@host",
    ],
)
def test_only_the_user_in_a_url_is_removed(url: str) -> None:
    text = scrubbed(f"cannot reach {url.format(CANARY)}, try a@b.example", {})
    assert CANARY not in text
    assert "cannot reach " in text and "(hidden)@" in text and text.endswith("try a@b.example")


def test_secret_is_removed_from_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    try:
        raise ValueError(f"bad token {CANARY}")
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "asked with %s", (CANARY,), sys.exc_info()
        )
    line = ScrubbingFormatter("%(message)s").format(record)
    assert CANARY not in line and "Traceback" in line and "bad token (hidden)" in line


def test_secret_is_removed_from_output_and_log_of_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    for name in ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "MLFLOW_LOGGING_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    loggers = [logging.getLogger(name) for name in ("flows", "rlhf_cli", "rlhf_core")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]

    def fail() -> int:
        set_up_logging(Home.of(tmp_path))
        raise RuntimeError(f"signature of {CANARY} does not match http://me:{CANARY}@host")

    try:
        assert cli.exit_code(fail) == 3
    finally:
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
    log = (tmp_path / "logs" / "rlhf.log").read_text()
    err = capsys.readouterr().err
    assert "signature of (hidden) does not match http://(hidden)@host" in err
    assert "Traceback" in log and "signature of (hidden)" in log
    assert CANARY not in log + err


def test_secret_is_removed_from_the_error_of_a_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, types\n"
        "def run_attempt(*_):\n"
        "    raise RuntimeError('401 for ' + os.environ['HF_TOKEN'])\n"
        "module = types.ModuleType('rlhf_core.run.attempt')\n"
        "module.run_attempt = run_attempt\n"
        "sys.modules[module.__name__] = module\n"
    )
    config = PipelineConfig()
    environment = stage_environment(config) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    log = tmp_path / "data-01.log"
    with pytest.raises(InfrastructureError, match=r"RuntimeError: 401 for \(hidden\)"):
        run_child(StageSpec("data", "0" * 16, config), log, environment, 60.0, lambda event: None)
    written = "".join(file.read_text() for file in tmp_path.iterdir() if file.suffix in (".log", ".json"))
    assert "Traceback" in written and "401 for (hidden)" in written
    assert CANARY not in written


def test_new_home_is_private_and_old_home_is_unchanged(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        home = Home(tmp_path / "new" / "home").make().path
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        (tmp_path / "old").mkdir(mode=0o755)
        assert stat.S_IMODE(Home(tmp_path / "old").make().path.stat().st_mode) == 0o755
    finally:
        os.umask(old)


def test_command_does_not_print_a_secret_of_its_environment(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_TOKEN": CANARY, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    (tmp_path / "c.yaml").write_text(f"ppo: {{steps: {CANARY}}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_cli.main", "run", "c.yaml"], cwd=tmp_path, env=environment,
        capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "ppo.steps" in done.stderr
    assert CANARY not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "piece", ["a", "a:", "//", "http://", "http://a:", "eyJ", "password", "bearer ", "?a", "-----BEGIN ", "@"]
)
def test_long_lines_are_scrubbed_in_time(piece: str) -> None:
    began = time.process_time()  # other programs do not change it
    text = "http://" + piece * (20_000 // len(piece))
    scrubbed(text, {"HF_TOKEN": CANARY})
    has_credentials(text)
    assert time.process_time() - began < 2.0
