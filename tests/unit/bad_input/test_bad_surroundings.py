"""Rewards, addresses, machines, environments and command lines that cannot work each give one clear message.

Rules: each input of the tables ends with exit code 2 and a message that names the field (or the
variable, or the option), the value where it may be shown, the rule and a fix. Nothing of the user's is
executed on the way.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from rlhf_cli import main as cli
from rlhf_core.executors.spec import past_proxies
from tests.support.scripted_machine import ScriptedMachine, on_machine
from tests.unit.bad_input.bad_inputs import Bad, Command, outside

BARE = "run: {seed: 1}\n"
ALONE = "reward: {enabled: false}\ndata: {preference: []}\n"


def reward(text: str) -> str:
    return f"{ALONE}ppo: {{rewards: [{{{text}}}]}}\n"


REWARD_FILES: dict[str, str | bytes] = {
    "r.py": "open('ran', 'w')\ndef score(samples): return [0.0 for _ in samples]\n",
    "broken.py": "def f(:\n",
    "binary.py": b"\x00\x01\x02",
}
PYTHON = "type: python, function: "
REWARDS = (
    Bad("no such file", reward(PYTHON + "'x:f', file: none.py"),
        ("ppo.rewards.0.file", "file not found: none.py")),
    Bad("a folder", reward(PYTHON + "'x:f', file: ."),
        ("ppo.rewards.0.file", ". is a folder, not a regular file", "*.py")),
    Bad("a pipe", reward(PYTHON + "'x:f', file: fifo.py"),
        ("ppo.rewards.0.file", "fifo.py is a pipe (FIFO), not a regular file")),
    Bad("not Python's suffix", reward(PYTHON + "'x:f', file: c.yaml"),
        ("ppo.rewards.0.file", "*.py", "c.yaml")),
    Bad("no such function", reward(PYTHON + "'x:f', file: r.py"), ("r.py has no function f", "score")),
    Bad("broken Python", reward(PYTHON + "'x:f', file: broken.py"), ("broken.py:1", "not valid Python")),
    Bad("bytes", reward(PYTHON + "'x:f', file: binary.py"), ("binary.py", "not valid Python")),
    Bad("no such module", reward(PYTHON + "'no_such_module_x:f'"),
        ("module no_such_module_x not found", "0.file")),
    Bad("no such part of a package", reward(PYTHON + "'yaml.nothing:f'"), ("module yaml.nothing not found",)),
    Bad("no such function of a module", reward(PYTHON + "'yaml.tokens:nothing'"),
        ("has no function nothing",)),
    Bad("a command of the system", reward(PYTHON + "'os:system'"),
        ("ppo.rewards.0.function", "os", "your own")),
    Bad("a part of the standard library", reward(PYTHON + "'json.decoder:scanstring'"),
        ("json.decoder", "your own")),
    Bad("a builtin", reward(PYTHON + "'builtins:exec'"), ("builtins", "your own")),
    Bad("nothing to count", reward("type: keywords, words: []"), ("ppo.rewards.0.words", "at least 1")),
    *(Bad(f"a service at {host}",
        reward(f"type: remote, urls: ['http://{host}/x']"),
        ("ppo.rewards.0", "its host"))
      for host in ("0177.0.0.1", "0x7f.1", "a..b", "xn--")),
    *(Bad(f"a token {title}",
        reward("type: remote, urls: ['http://127.0.0.1/x']"),
        ("RLHF_REWARD_TOKEN", "must"), environment={"RLHF_REWARD_TOKEN": value})
      for title, value in (("with an accent", "hunter2-é"), ("of two lines", "hunter2\nhunter2"),
          ("that is blank", " \n"))),
)  # fmt: skip


@pytest.mark.parametrize("bad", REWARDS, ids=lambda bad: bad.title)
def test_a_reward_that_cannot_work_is_refused_and_not_run(
    command: Command, bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: [(2, 1, 6, "", ("10.1.2.3", 0))])
    for name, content in REWARD_FILES.items():
        (command.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    os.mkfifo(command.folder / "fifo.py")
    command.complaint(bad)
    assert not (command.folder / "ran").exists()


ADDRESSES = {
    "store.url=s3://": ("store.url", "s3://bucket/prefix"),
    "store.url=s3:///prefix": ("store.url", "s3://bucket/prefix"),
    "store.url=s3://A_B/x": ("store.url", "3 to 63"),
    "store.url=s3://b/x": ("store.url", "3 to 63"),
    "store.url=s3://bucket/../other": ("store.url", "prefix", "'..'"),
    "store.url=gs://bucket/x": ("store.url", "scheme gs://"),
    "store.url=http://bucket/x": ("store.url", "scheme http://"),
    "store.url=file://host/x": ("store.url", "host"),
    "store.url=''": ("store.url",),
    "store.url=c.yaml": ("store.url", "is a file"),
    "store.url='a\\0b'": ("store.url",),
    "store.endpoint=localhost:9000": ("store.endpoint", "http(s)://"),
    "store.endpoint=http://": ("store.endpoint", "http(s)://"),
    "tracking.uri=ftp://host": ("tracking.uri", "scheme ftp://", "http"),
    "tracking.uri=databricks": ("tracking.uri", "'databricks'", "http"),
    "tracking.uri=./mlruns": ("tracking.uri", "'./mlruns'", "sqlite:///"),
    "tracking.uri=file:///mlruns": ("tracking.uri", "scheme file://"),
    "tracking.uri=sqlite://": ("tracking.uri", "sqlite:///path"),
    "tracking.uri=sqlite:///fifo": ("tracking.uri", "fifo is a pipe (FIFO), not a regular file", "remove it"),
    "tracking.uri=http://": ("tracking.uri", "host", "http://host:port"),
    "run.home=c.yaml/x": ("run.home", "is a file"),
    "run.home=''": ("run.home", "non-empty text"),
    "run.home='a\\0b'": ("run.home",),
    "run.home=team#1/.rlhf": ("run.home", "team#1", "has #", "choose another"),
    "run.home=a%41": ("run.home", "has %", "choose another"),
    "run.home=what?": ("run.home", "has ?", "choose another"),
    "tracking.uri=sqlite:////tmp/team#1/mlflow.db": ("tracking.uri", "sqlite:///path/of/a/file.db"),
    "run.home=/proc/nothing": ("run.home", "/proc/nothing", "cannot be made"),
}  # fmt: skip


@pytest.mark.parametrize("override", ADDRESSES)
def test_an_address_or_folder_that_cannot_work_is_refused(command: Command, override: str) -> None:
    os.mkfifo(command.folder / "fifo")
    name, _, value = override.partition("=")
    text = value if value.startswith("'") else f"'{value}'"
    (section, _, key), words = name.partition("."), ADDRESSES[override]
    command.complaint(Bad(override, f"{section}: {{{key}: {text.replace(chr(39), chr(34))}}}\n", words))


SETTINGS = {
    "pairs that are missing": (("data.preference=[]", "ppo.rewards=[{type: gold}]"),
        ("reward.enabled", "data.preference is empty")),
    "a judge that is not trained": (
        ("reward.enabled=false", "ppo.rewards=[{type: gold}]", "evaluate.judge=reward_model"),
        ("evaluate.judge",),
    ),
    "a judge without a model": (("evaluate.judge=judge_model",), ("evaluate.judge", "reward.judge={}")),
    "a judge without rules": (("evaluate.judge=rules",), ("evaluate.judge", "ppo.rewards")),
    "more ranks than a batch": (
        ("sft.batch_size=2", "sft.deepspeed.ranks=4"), ("sft.deepspeed.ranks", "sft.batch_size (2)", "got 4"),
    ),
    "a GPU where there is none": (("run.device=cuda",), ("run.device", "0 visible GPUs")),
    "NCCL without a GPU": (("ppo.weight_sync.backend=nccl",),
        ("ppo.weight_sync.backend", "use auto or gloo")),
    "CUDA IPC without a GPU": (("ppo.weight_sync.backend=ipc", "ppo.colocate=all"),
        ("ppo.weight_sync.backend", "use auto or gloo")),
    "an engine in more parts than heads divide into": (
        ("ppo.engine.tensor_parallel=3",),
            ("ppo.engine.tensor_parallel", "4 attention heads", "got 3; use 2"),
    ),
    "flash attention without a GPU": (("model.attention=flash_attention_2",),
        ("model.attention", "use sdpa")),
    "offload without a GPU": (
        ("sft.deepspeed.offload=optimizer", "sft.deepspeed.zero_stage=2"),
        ("sft.deepspeed.offload", "use none"),
    ),
    "offload without ZeRO": (("ppo.policy_deepspeed.offload=optimizer",),
        ("ppo.policy_deepspeed.zero_stage", "got 0")),
    "parameters offloaded without ZeRO-3": (
        ("sft.deepspeed.offload=all", "sft.deepspeed.zero_stage=2"), ("sft.deepspeed.zero_stage 3", "got 2"),
    ),
    "a second copy without ZeRO-3": (("sft.deepspeed.hpz=2", "sft.deepspeed.ranks=2"),
        ("sft.deepspeed.hpz", "zero_stage=3")),
    "a second copy over ranks that do not divide": (
        ("sft.deepspeed.hpz=2", "sft.deepspeed.zero_stage=3"),
        ("sft.deepspeed", "hpz must divide ranks (1)", "got 2"),
    ),
    **{
        f"float32 sums with {title}": (
            ("ppo.policy_deepspeed.grad_accum_dtype=float32",
                *(f"ppo.policy_deepspeed.{one}" for one in settings)),
            ("ppo.policy_deepspeed.grad_accum_dtype", *words),
        )
        for title, settings, words in (
            ("no ZeRO", ("dtype=bfloat16",), ("zero_stage 2 or 3", "got 0", "zero_stage=2")),
            ("ZeRO 1", ("dtype=bfloat16", "zero_stage=1"), ("zero_stage 2 or 3", "got 1")),
            ("offload", ("dtype=bfloat16", "zero_stage=2", "offload=optimizer"),
                ("offload=none", "got optimizer")),
            ("float16", ("dtype=float16", "zero_stage=2"), ("dtype=bfloat16", "got float16")),
        )
    },
    "sums in float64": (("sft.deepspeed.grad_accum_dtype=float64",),
        ("sft.deepspeed.grad_accum_dtype", "float32")),
    "a head in bfloat16": (("model.head_dtype=bfloat16",), ("model.head_dtype", "model, float32")),
    "float16 without ZeRO": (("sft.deepspeed.dtype=float16",), ("sft.deepspeed.zero_stage", "got 0")),
    "float16 without a GPU": (
        ("reward.deepspeed.dtype=float16", "reward.deepspeed.zero_stage=1"),
        ("reward.deepspeed.dtype", "needs a GPU"),
    ),
    "a cache larger than memory": (("ppo.engine.kv_cache_gib=4096",),
        ("ppo.engine.kv_cache_gib", "must fit")),
}  # fmt: skip


@pytest.mark.parametrize("title", SETTINGS)
def test_settings_that_contradict_each_other_or_the_machine_are_refused(command: Command, title: str) -> None:
    overrides, words = SETTINGS[title]
    command.complaint(Bad(title, BARE, words, overrides))


FLASH = "model.attention=flash_attention_2"
ON_GPUS = {
    "flash attention that is not installed": ((FLASH,), (),
        ("model.attention", "package flash_attn", "use sdpa")),
    "flash attention in float32": (
        (FLASH, "reward.deepspeed.dtype=float32"), ("flash_attn",),
        ("model.attention", "no float32", "reward.deepspeed.dtype is here"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", ON_GPUS)
def test_settings_that_gpus_cannot_serve_are_refused(command: Command, title: str) -> None:
    overrides, packages, words = ON_GPUS[title]
    gpus = ["NVIDIA H100 80GB HBM3"] * 8
    versions = {"nvidia-nccl-cu13": "2.29.7"}
    with on_machine(ScriptedMachine(gpus=gpus, packages=packages, versions=versions)):
        message = command.complaint(Bad(title, BARE, words, overrides))
    assert message.count("flash_attention_2") == (FLASH in overrides)


SECRET = "hunter2hunter2"
ENVIRONMENTS = {
    "a tracker of an unknown kind": ({"MLFLOW_TRACKING_URI": "ftp://host"}, ("MLFLOW_TRACKING_URI", "scheme ftp://")),
    "a tracker that is a word": ({"MLFLOW_TRACKING_URI": "databricks"},
        ("MLFLOW_TRACKING_URI", "'databricks'")),
    "a tracker's token with a line break": ({"MLFLOW_TRACKING_TOKEN": f"{SECRET}\n"},
        ("MLFLOW_TRACKING_TOKEN", "(hidden)")),
    "a tracker's token with an umlaut": ({"MLFLOW_TRACKING_TOKEN": f"{SECRET}\u00e4"},
        ("MLFLOW_TRACKING_TOKEN", "ASCII")),
    "a timeout of the tracker that is a word": (
        {"MLFLOW_HTTP_REQUEST_TIMEOUT": "ten"}, ("MLFLOW_HTTP_REQUEST_TIMEOUT", "whole number", "'ten'"),
    ),
    "more tries than MLflow allows": ({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "99"},
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "10")),
    "an endpoint without a scheme": ({"AWS_ENDPOINT_URL_S3": "localhost:9000"}, ("AWS_ENDPOINT_URL_S3", "http(s)://")),
    "an endpoint with a password": ({"AWS_ENDPOINT_URL_S3": f"http://me:{SECRET}@host"},
        ("AWS_ENDPOINT_URL_S3", "credentials")),
    "a failpoint that is none": ({"RLHF_FAIL": "ppo.after_rollout"}, ("RLHF_FAIL", "name:nth:action")),
    "a failpoint without a number": ({"RLHF_FAIL": "a:b:kill"}, ("RLHF_FAIL", "name:nth:action")),
    "assertions turned off": ({"PYTHONOPTIMIZE": "1"}, ("PYTHONOPTIMIZE", "unset")),
    "insecure serialization": ({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        ("VLLM_ALLOW_INSECURE_SERIALIZATION", "unset")),
    "Ray without authentication": ({"RAY_AUTH_MODE": "disabled"}, ("RAY_AUTH_MODE", "unset")),
    "models of the registry that run code": (
        {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "true"}, ("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "unset"),
    ),
    "a folder for temporary files that is a file": ({"TMPDIR": "c.yaml"}, ("TMPDIR", "c.yaml", "is a file")),
    "a folder for Ray's files that is a file": ({"RAY_TMPDIR": "c.yaml"},
        ("RAY_TMPDIR", "c.yaml", "is a file")),
    "a Ray cluster that is not there": ({"RAY_ADDRESS": "127.0.0.1:1"},
        ("RAY_ADDRESS", "127.0.0.1:1", "unset it")),
    "a Ray cluster without a host": ({"RAY_ADDRESS": "nonsense:1"},
        ("RAY_ADDRESS", "nonsense:1", "unset it")),
    "a Ray cluster with a port beyond all": ({"RAY_ADDRESS": "127.0.0.1:99999"},
        ("RAY_ADDRESS", "host:port", "127.0.0.1:99999", "unset it")),
    "any Ray cluster": ({"RAY_ADDRESS": "auto"}, ("RAY_ADDRESS", "host:port", "'auto'", "unset it")),
    "a Ray client": ({"RAY_ADDRESS": "ray://host:10001"}, ("RAY_ADDRESS", "host:port", "unset it")),
    "a token in Prefect's address": (
        {"PREFECT_API_URL": f"http://{SECRET}@127.0.0.1:9/api"},
        ("PREFECT_API_URL", "credentials", "PREFECT_API_KEY"),
    ),
    "a password in Prefect's address": (
        {"PREFECT_API_URL": f"http://me:{SECRET}@127.0.0.1:9/api"}, ("PREFECT_API_URL", "credentials"),
    ),
    "Prefect's address without a scheme": ({"PREFECT_API_URL": "localhost:4200"}, ("PREFECT_API_URL", "http(s)://")),
    "a proxy of SOCKS without its package": ({"ALL_PROXY": "socks5://127.0.0.1:9"},
        ("ALL_PROXY", "socksio", "unset")),
    "a proxy of FTP": ({"HTTP_PROXY": "ftp://127.0.0.1"}, ("HTTP_PROXY", "http(s)://", "ftp://", "unset")),
    "a proxy with a password": ({"http_proxy": f"ftp://me:{SECRET}@127.0.0.1"}, ("http_proxy", "(hidden)")),
    "a host without a proxy that is no host": ({"no_proxy": "[::1]:80"},
        ("no_proxy", "Invalid port", "unset")),
    "certificates that are not there": ({"SSL_CERT_FILE": "/nowhere"},
        ("SSL_CERT_FILE", "/nowhere", "No such file", "unset")),
    "certificates that are none": ({"SSL_CERT_FILE": "c.yaml"}, ("SSL_CERT_FILE", "c.yaml", "unset")),
    "checkpoints that run code": ({"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "unset")),
}  # fmt: skip


@pytest.mark.parametrize("title", ENVIRONMENTS)
def test_an_environment_that_cannot_work_or_opens_a_door_is_refused(command: Command, title: str) -> None:
    environment, words = ENVIRONMENTS[title]
    message = command.complaint(Bad(title, BARE, words, environment=environment))
    assert SECRET not in message


LINES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "an unknown command": (["train"], ('Unknown command "train"', "Available commands")),
    "no configuration": (["run"], ("CONFIG requires an argument", "rlhf run --help")),
    "an unknown option": (["run", "c.yaml", "--nonsense"], ("Unknown option: --nonsense",)),
    "an unknown option with a value": (["run", "c.yaml", "--steps=abc"], ("Unknown option: --steps=abc",)),
    "an option without its value": (["run", "c.yaml", "--until"], ("--until requires an argument",)),
    "an unknown stage": (["run", "c.yaml", "--until", "train"], ('Invalid value "train" for --until', "sft")),
    "a port that is no number": (["serve", "p", "--port", "x"], ("Invalid value for --port", '"x"')),
    "an override of status": (["status", "ppo.steps=3"], ("Unused Tokens", "ppo.steps=3")),
    "plan without a configuration": (["plan"], ("CONFIG requires an argument", "rlhf plan --help")),
}


@pytest.mark.parametrize("title", LINES)
def test_a_command_line_that_cannot_be_read_ends_with_2_and_the_way_to_the_help(
    title: str, capsys: pytest.CaptureFixture[str], counted: list[str]
) -> None:
    arguments, words = LINES[title]
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.endswith(" --help has what it takes\n")
    assert "Traceback" not in message
    assert [word for word in words if word not in message] == [], message
    counted.append(message)


COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "stages in the wrong order": (["run", "c.yaml", "--from", "ppo", "--until", "sft"],
        ("ppo (--from), comes after the last stage, sft (--until)",)),
    "a word that is no override": (["run", "c.yaml", "again"], ("override again", "section.field=value")),
    "no such GPUs": (["plan", "c.yaml", "--gpus", "8xZ9"],
        ("--gpus", "8xA100-80G", "'8xZ9'", "known: A100-40G")),
    "no GPUs": (["plan", "c.yaml", "--gpus", "0xA100-80G"], ("--gpus", "'0xA100-80G'")),
    "no such reward model": (["serve-reward", "./none"], ("none must hold a reward model",)),
    "a folder without a model": (["serve-reward", "."], ("config.json is missing",)),
    "a service for everybody": (["serve-reward", ".", "--host", "0.0.0.0"], ("--host", "RLHF_REWARD_TOKEN")),
    "a service for everybody by a short token": (["serve-reward", ".", "--host", "0.0.0.0"],
        ("RLHF_REWARD_TOKEN", "at least 16")),
    "no such address": (["serve-reward", ".", "--host", "192.0.2.1"], ("--host", "192.0.2.1")),
    "no such port": (["serve-reward", ".", "--port", "99999"], ("--port", "99999")),
    "no such shape": (["plan", "c.yaml", "--model-config", "none.json"],
        ("none.json", "readable config.json")),
    "a shape that is a list": (["plan", "c.yaml", "--model-config", "list.json"],
        ("list.json", "is no JSON object")),
    "a shape without a width": (["plan", "c.yaml", "--model-config", "empty.json"],
        ("hidden_size", "must be integers")),
    "a shape nested deeply": (["plan", "c.yaml", "--model-config", "deep.json"],
        ("deep.json", "readable config.json")),
    "a shape in Latin-1": (["plan", "c.yaml", "--model-config", "latin.json"],
        ("latin.json", "readable config.json")),
    "a shape without heads": (["plan", "c.yaml", "--model-config", "zero.json"],
        ("num_attention_heads", "above 0")),
    "a plan of a bad configuration": (["plan", "c.yaml", "ppo.stpes=3"], ("ppo.stpes: unknown key",)),
    "a home that is a file": (["up", "--home", "c.yaml"], ("--home", "c.yaml")),
    "a home below a file": (["status", "--home", "c.yaml/x"], ("--home", "c.yaml")),
    "nothing to take down": (["down", "--home", "c.yaml"], ("--home", "c.yaml")),
}  # fmt: skip


@pytest.mark.parametrize("title", COMMANDS)
def test_an_argument_that_cannot_work_gives_one_message(
    command: Command, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, words = COMMANDS[title]
    zero = (
        b'{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 0,'
        b' "vocab_size": 8}'
    )
    files = {"c.yaml": BARE.encode(), "list.json": b"[]", "empty.json": b"{}", "deep.json": b"[" * 100_000}
    if "short token" in title:
        monkeypatch.setenv("RLHF_REWARD_TOKEN", "a")
    for name, content in {**files, "latin.json": b'{"a": "\xe9"}', "zero.json": zero}.items():
        (command.folder / name).write_bytes(content)
    message = command.message(*arguments)
    assert [word for word in words if word not in message] == [], message


def test_a_home_that_the_output_cannot_encode_is_escaped(tmp_path: Path) -> None:
    environment = {"PYTHONIOENCODING": "ascii"}
    done = outside(tmp_path, "status", "--home", "hé", env=environment, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "h\\xe9" in done.stdout


@pytest.mark.parametrize("name", ["run: {name: 'café 🦊'}", "ppo: {'stéps': 3}"])
def test_a_message_is_written_without_a_terminal_and_in_the_c_locale(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.yaml").write_text(name, encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = outside(tmp_path, "run", "c.yaml", env=plain, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: c.yaml:1: ") and "Traceback" not in done.stderr


def test_a_closed_output_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = outside(tmp_path, "status", "--home", str(tmp_path), stdout=write)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_with_closed_streams_works(tmp_path: Path, closed: str) -> None:
    script = f"{sys.executable} -m rlhf_cli.main status --home {tmp_path} {closed}; echo $? > {tmp_path}/code"
    subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (tmp_path / "code").read_text() == "0\n"


def test_requests_to_this_machine_bypass_a_proxy() -> None:
    environment = past_proxies({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "corp.example"})
    assert environment == dict.fromkeys(("NO_PROXY", "no_proxy"), "corp.example,127.0.0.1,localhost")
    hosts = {"no": environment["no_proxy"]}
    assert urllib.request.proxy_bypass_environment("127.0.0.1:4200", hosts)  # type: ignore[attr-defined]
    assert urllib.request.proxy_bypass_environment("localhost:1", hosts)  # type: ignore[attr-defined]


NO_PROXY = {
    "every host": ({"NO_PROXY": "*"}, "*"),
    "every host, in lower case": ({"no_proxy": "*", "NO_PROXY": "a.example"}, "*"),
    "both spellings": ({"no_proxy": "a.example", "NO_PROXY": "b.example,a.example"},
        "a.example,b.example,127.0.0.1,localhost"),
    "blanks and empty parts": ({"NO_PROXY": " a.example, ,localhost"}, "a.example,localhost,127.0.0.1"),
    "neither": ({}, "127.0.0.1,localhost"),
}  # fmt: skip


@pytest.mark.parametrize("title", NO_PROXY)
def test_hosts_that_were_asked_past_a_proxy_still_are(title: str) -> None:
    given, value = NO_PROXY[title]
    environment = past_proxies(given)
    assert environment == {"NO_PROXY": value, "no_proxy": value}
    known = [name.strip() for names in given.values() for name in names.split(",") if name.strip()]
    for host in ["any.example" if name == "*" else name for name in known]:
        assert urllib.request.proxy_bypass_environment(host, {"no": environment["no_proxy"]}), host  # type: ignore[attr-defined]
