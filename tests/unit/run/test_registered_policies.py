"""Registered policies by name, `rlhf serve` and `rlhf publish`.

- the files are those that were registered, or it is an error; revoked and unknown versions are refused
- vLLM reads the tokenizer as its file says, whatever the class of the model
- vLLM listens on loopback and refuses web pages; other addresses need a key, and --vllm cannot change it
- a published folder loads with transformers, and its card has data, digests, evaluation, licences and limits
- a folder with files is refused; a kill leaves nothing that stays
- on the hub the files arrive in a private repository; a refusal is one message; files that are there are kept
- a card has no paths, buckets and messages of errors; it says that the weights contain the adapter
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from rlhf_cli.main import main
from rlhf_core.errors import CorruptArtifact, InputError
from rlhf_core.evaluation.policy_files import PolicyFiles
from rlhf_core.ops.publish import licence_of, model_card, publish
from rlhf_core.ops.serve import serve_command, tokenizer_alone
from rlhf_core.pipeline import StageName
from rlhf_core.run.registered_policies import RegisteredPolicy, open_policy
from rlhf_core.storage.artifacts import Provenance
from rlhf_core.storage.bundles import weights_sha256
from rlhf_core.tracking.champions import BASE, WEIGHTS, rollback
from rlhf_core.tracking.mlflow_client import Mlflow
from tests.support.registered_policy import EVALUATION, OF_PPO, register_policy

MODEL = "served-policy"


@pytest.fixture(scope="module")
def weights(database: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the weights of two versions."""
    mlflow, folder = Mlflow(f"sqlite:///{database}", "served"), tmp_path_factory.mktemp("served")
    return [register_policy(mlflow, MODEL, folder / "store", folder, number) for number in (1, 2)]


@pytest.fixture
def home(database: Path, weights: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    return str(tmp_path / "home")


def test_names_lead_to_the_registered_files(home: str, weights: list[str]) -> None:
    for address, number in (("", 2), ("@champion", 2), ("@2", 2), ("@1", 1)):
        policy = open_policy(MODEL + address, home)
        assert (policy.version.version, policy.weights) == (str(number), weights[number - 1])
        assert weights_sha256(policy.files.model) == policy.weights
        assert policy.files.adapter is None
    with pytest.raises(InputError, match=r"has no version 7; its versions are 1, 2"):
        open_policy(f"{MODEL}@7", home)
    with pytest.raises(InputError, match="has no version newest"):
        open_policy(f"{MODEL}@newest", home)


def test_vllm_reads_the_tokenizer_without_the_config_of_the_model(home: str) -> None:
    """Beside the config.json of qwen2, transformers would use its own pre-tokenizer."""
    policy = open_policy(MODEL, home)
    model, folder = policy.files.model, tokenizer_alone(policy, home)
    assert tokenizer_alone(policy, home) == folder, "another start adds no folder"
    assert (folder / "tokenizer.json").readlink().is_absolute()
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not (folder / "config.json").exists()


def test_a_store_that_was_moved_is_named_and_is_found_by_a_link(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    store = tmp_path / "store"
    register_policy(Mlflow(f"sqlite:///{database}", "served"), "moved", store, tmp_path, 1)
    store.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=rf"ppo artifact .* not in its store any more, .*: {store};"):
        open_policy("moved", str(tmp_path / "home"))
    assert not store.exists(), "nothing is made at the old place"
    store.symlink_to(tmp_path / "elsewhere")
    assert open_policy("moved", str(tmp_path / "home")).version.version == "1"


def test_vllm_serves_on_loopback_or_with_a_key(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = open_policy(MODEL, home)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    command = serve_command(policy, "127.0.0.1", 8000, ["--max-model-len", "32"])
    assert command.count("--middleware") == 1
    text = " ".join(command)
    assert f"--model {policy.files.model} --host 127.0.0.1 --port 8000 --dtype float32" in text
    assert "--middleware rlhf_core.system.serving.OwnAddressOnly" in text
    assert f"--served-model-name {MODEL} {MODEL}@2" in text and text.endswith("--max-model-len 32")
    for host in ("0.0.0.0", "gpu7", "::"):
        with pytest.raises(InputError, match="set VLLM_API_KEY"):
            serve_command(policy, host, 8000)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert serve_command(policy, "0.0.0.0", 8000).count("--middleware") == 1
    for host in ("0.0.0.0", "127.0.0.1"):
        assert "--middleware rlhf_core.system.serving.KeyOnly" in " ".join(serve_command(policy, host, 8000))
    assert "k" not in serve_command(policy, "0.0.0.0", 8000), "other users see arguments of processes"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would replace the process of the tests."""
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda _file, command, _environment: commands.append(command))
    return commands


@pytest.mark.parametrize(
    "arguments",
    [
        "--host 0.0.0.0", "--host=0.0.0.0", "--hos 0.0.0.0", "--host.x 1", "--port 1", "--uds /x",
        "--model x", "--served-model-name x", "--served_model_name=x", "--lora-modules x=y", "--lora-mod x=y",
        "--middleware x.Y", "--api-key k", "--api_key=k", "--root-path /v1", "--allowed-origins [*]",
        "--config x.yaml",
    ],
)  # fmt: skip
def test_options_that_bypass_the_rules_are_refused(
    home: str, arguments: str, capsys: pytest.CaptureFixture[str], started: list[list[str]]
) -> None:
    given = ["--max-model-len", "32", *arguments.split()]
    assert main(["serve", MODEL, "--home", home, "--port", "0", "--vllm", *given]) == 2
    assert "--vllm must not contain --" in capsys.readouterr().err
    assert started == []


def test_an_end_of_options_is_refused(home: str) -> None:
    with pytest.raises(InputError, match="--vllm must not contain --"):
        serve_command(open_policy(MODEL, home), "127.0.0.1", 8000, ["--", "--host", "0.0.0.0"])


def test_other_options_of_vllm_are_passed_on(home: str) -> None:
    more = [
        "--max-model-len",
        "32",
        "--load-format=safetensors",
        "--compilation-config.mode",
        "0",
        "-tp",
        "2",
    ]
    assert serve_command(open_policy(MODEL, home), "127.0.0.1", 8000, more)[-len(more) :] == more


@pytest.mark.parametrize(
    "given",
    [
        ["--override-generation-config", '{"temperature": 0.5}'],
        ['--override-generation-config={"temperature": 0.5}'],
        ['--override-generation-config={"temperature":0.5}', "--enforce-eager", "-tp", "2"],
    ],
)
def test_a_value_with_blanks_or_quotes_goes_to_vllm_as_it_is(
    home: str, given: list[str], started: list[list[str]]
) -> None:
    main(["serve", MODEL, "--home", home, "--port", "0", "--vllm", *given])
    assert started[0][-len(given) :] == given


def test_an_address_that_cannot_be_used_is_refused_before_vllm_starts(
    home: str, capsys: pytest.CaptureFixture[str], started: list[list[str]]
) -> None:
    assert main(["serve", MODEL, "--home", home, "--port", "99999"]) == 2
    assert "--port must be from 0 to 65535; got 99999" in capsys.readouterr().err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", MODEL, "--home", home, "--port", str(port)]) == 2
    assert f"must be a free address of this machine; got 127.0.0.1 {port}" in capsys.readouterr().err
    assert started == []


def test_a_folder_that_cannot_be_written_is_an_input_error(
    home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["publish", f"{MODEL}@1", str(tmp_path / "file" / "x"), "--home", home]) == 2
    assert f"error: {tmp_path}/file/x cannot be written (" in capsys.readouterr().err
    assert main(["publish", f"{MODEL}@1", str(tmp_path / "file"), "--home", home]) == 2
    assert f"error: {tmp_path}/file is a file; name a folder" in capsys.readouterr().err
    policy, limits = open_policy(f"{MODEL}@1", home), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a disk that becomes full
    try:
        with pytest.raises(InputError, match=r"x cannot be written \(\[Errno 27\] File too large: .*; free"):
            publish(policy, tmp_path / "out" / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_adapter_is_served_on_its_base(home: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 12}')
    policy = open_policy(MODEL, home)
    adapted = replace(policy, files=PolicyFiles(tmp_path / "sft", tmp_path))
    text = " ".join(serve_command(adapted, "localhost", 1))
    assert f"--model {tmp_path}/sft" in text and "--enable-lora --max-lora-rank 16" in text
    assert f"--lora-modules {MODEL}={tmp_path} {MODEL}@2={tmp_path}" in text


def test_published_folder_loads_and_has_a_card(home: str, tmp_path: Path, weights: list[str]) -> None:
    folder = tmp_path / "out" / "demo"
    assert main(["publish", f"{MODEL}@1", str(folder), "--home", home]) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 64
    assert AutoTokenizer.from_pretrained(folder).encode("fox")
    assert weights_sha256(folder) == weights[0]
    card = (folder / "README.md").read_text()
    for words in (
        f"# {MODEL}, version 1",
        f"sha256 `{weights[0]}`",
        "| data.sft[0] | `a/b.jsonl` | `dddddddddddddddddddddddd` |",
        "| win rate over the SFT model | 0.750 | [0.7, 0.8] |",
        "Judge: reward model, on 128 held-out prompts (90 won, 30 lost, 8 tied)",
        "Promotion: it won 1.",
        "- Base model: unknown",
        "**The policy was trained on the judge**",
    ):
        assert words in card
    assert "license:" not in card
    assert main(["publish", f"{MODEL}@2", str(folder), "--home", home]) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == ["demo"]


def test_a_link_is_no_folder_to_publish_to(home: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    with pytest.raises(InputError, match="link is a link; name a folder"):
        publish(open_policy(f"{MODEL}@1", home), link)


_KILLED = """
import os, signal, sys
from pathlib import Path
from rlhf_core.ops import publish
from rlhf_core.run.registered_policies import open_policy

publish.model_card = lambda policy: os.kill(os.getpid(), signal.SIGKILL)
publish.publish(open_policy(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))
"""


def test_the_next_command_deletes_what_a_killed_one_has_left(home: str, tmp_path: Path) -> None:
    target = tmp_path / "out" / "demo"
    command = [sys.executable, "-c", _KILLED, f"{MODEL}@1", home, str(target)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    left = sorted(path.name for path in target.parent.iterdir())
    assert [name.startswith(".tmp-publish-") for name in left] == [True, True], "the folder and its lock"
    (target.parent / "mine.lock").write_text(socket.gethostname())
    (target.parent / "mine").mkdir()
    publish(open_policy(f"{MODEL}@1", home), target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["demo", "mine", "mine.lock"]


class Hub(BaseHTTPRequestHandler):
    """The calls of the hub that an upload of small files needs. It refuses the owner `taken`."""

    calls: list[tuple[str, str]]
    files: ClassVar[dict[str, str]] = {}
    """Files of `team/demo`, which is public."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.calls.append((self.path, body))
        if self.path == "/api/repos/create":
            repository = "/".join((json.loads(body)["organization"], json.loads(body)["name"]))
            refused = repository.startswith("taken/")
            self.reply(
                401 if refused else 200,
                {"url": f"http://{self.headers['host']}/{repository}", "error": "not yours"},
            )
        elif self.path.endswith("/preupload/main"):
            files = [
                {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            self.reply(200, {"files": files})
        else:
            url = f"http://{self.headers['host']}/team/demo/commit/abc"
            self.reply(200, {"commitUrl": url, "commitOid": "abc"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            content = self.files["README.md"].encode()
            self.send_response(200)
            headers = {"etag": '"1"', "x-repo-commit": "0" * 40, "content-length": str(len(content))}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
        elif "/tree/" in self.path:
            names = list(self.files) or ["model-00002-of-00002.safetensors"]
            self.reply(200, [{"type": "file", "path": name, "oid": "1", "size": 9} for name in names])
        else:
            known = [{"rfilename": name} for name in self.files]
            unknown = "taken" in self.path or "new" in self.path
            status = 404 if unknown else 200
            error = {"x-error-code": "RepoNotFound"} if unknown else {}
            about = {"siblings": known, "sha": "0" * 40, "id": "team/demo", "private": False}
            self.reply(status, about, error)

    def reply(self, status: int, body: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A hub on loopback, which ends with the test."""
    Hub.calls, Hub.files = [], {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", address, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield server
        server.shutdown()
        thread.join()


def test_files_on_the_hub_are_deleted_only_on_request(
    home: str, tmp_path: Path, hub: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{MODEL}@1", "hub:team/demo", "--home", home
    Hub.files = {"data.bin": "", "notes.txt": ""}
    assert main(["publish", *target]) == 2
    assert "team/demo exists with 2 files, and an upload deletes all of them" in capsys.readouterr().err
    assert not [path for path, _ in Hub.calls if path.endswith("/commit/main")]
    assert main(["publish", *target, "--replace"]) == 0
    assert "(public: everybody can read it)" in capsys.readouterr().out
    assert "tags:\n- rlhf\n- ppo\n" in model_card(open_policy(MODEL, home)).split("---\n", 2)[1]
    assert main(["publish", f"{MODEL}@1", str(tmp_path / "out"), "--home", home, "--replace"]) == 2


def test_publishing_makes_a_private_repository_and_replaces_its_files(
    home: str, weights: list[str], capsys: pytest.CaptureFixture[str], hub: ThreadingHTTPServer
) -> None:
    Hub.files = {}
    done = main(["publish", f"{MODEL}@1", "hub:new/demo", "--home", home])
    refused = main(["publish", f"{MODEL}@1", "hub:taken/demo", "--home", home])
    wrong = main(["publish", f"{MODEL}@1", "hub:no/such/name", "--home", home])
    hub.shutdown()
    hub.server_close()
    gone = main(["publish", f"{MODEL}@1", "hub:team/demo", "--home", home])
    assert (done, refused, wrong, gone) == (0, 2, 2, 2)
    output = capsys.readouterr()
    assert "commit/abc (private)" in output.out
    assert "taken/demo cannot be written on the hub" in output.err
    assert "no/such/name cannot be written on the hub" in output.err
    assert "team/demo cannot be written on the hub" in output.err
    created = json.loads(Hub.calls[0][1])
    assert created["visibility"] == "private"
    commits = [body for path, body in Hub.calls if path.endswith("/commit/main")]
    lines = [json.loads(line) for line in commits[0].splitlines()]
    assert len(commits) == 1
    assert weights[0] in lines[0]["value"]["summary"]
    deleted = [line["value"]["path"] for line in lines if line["key"] == "deletedFile"]
    assert deleted == ["model-00002-of-00002.safetensors"], "of an earlier version"
    sent = {line["value"]["path"] for line in lines if line["key"] == "file"}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= sent


def test_licence_of_a_base_model_is_in_the_card(home: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    policy = open_policy(MODEL, home)
    config = {**policy.config, "model": {**policy.config["model"], "path": str(tmp_path)}}
    card = model_card(replace(policy, config=config))
    assert "license: apache-2.0" in card and "- Base model: apache-2.0" in card
    assert "base_model:" not in card, "a folder is no id on the hub"


def test_the_card_follows_a_champion_to_the_first_base_model(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 2 was trained from version 1, and version 3 from version 2."""
    mlflow, first = Mlflow(f"sqlite:///{database}", "served"), tmp_path / "tiny-base"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    first.mkdir()
    (first / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    for number in (1, 2, 3):
        base = str(first) if number == 1 else f"/folder/of/version/{number - 1}/policy"
        register_policy(mlflow, "chain", tmp_path / "store", tmp_path, number, base=base)
        if number > 1:
            mlflow.tag_version("chain", str(number), {BASE: f"registry://chain/{number - 1}"})
    card = model_card(open_policy("chain", str(tmp_path)))
    assert "Base model: `chain version 2` (which goes back to `tiny-base`), then" in card
    assert "license: apache-2.0" in card and "- Base model: apache-2.0" in card and "folder" not in card
    assert "Base model: `tiny-base`, then" in model_card(open_policy("chain@1", str(tmp_path)))
    mlflow._client.delete_model_version("chain", "1")
    card = model_card(open_policy("chain", str(tmp_path)))
    assert "Base model: `chain version 2` (which goes back to `chain version 1`), then" in card
    assert "license:" not in card and "- Base model: unknown" in card
    assert "the base model registry://chain/1 cannot be found any more" in caplog.text
    mlflow.tag_version("chain", "2", {BASE: "registry://chain/3"})
    assert "- Base model: unknown" in model_card(open_policy("chain", str(tmp_path))), "edited tags end"
    mlflow.tag_version("chain", "3", {BASE: "artifact://ppo/0123456789abcdef/policy"})
    card = model_card(open_policy("chain", str(tmp_path)))
    assert "Base model: `artifact ppo/0123456789abcdef`, then" in card and "- Base model: unknown" in card


def test_the_card_has_the_number_of_reward_models(home: str) -> None:
    policy = open_policy(MODEL, home)
    assert "a reward model" in model_card(policy)
    ensemble = {"members": 3, "combine": "uncertainty", "penalty": 1.0}
    config = {**policy.config, "reward": {**policy.config["reward"], "ensemble": ensemble}}
    assert "3 reward models" in model_card(replace(policy, config=config))


def test_the_card_names_averaged_weights(home: str) -> None:
    policy = open_policy(MODEL, home)
    text = "The weights are a moving average over the optimizer steps of PPO, with a decay of 0.99 per step"
    for published, is_average in (("average", True), ("last", False)):
        ppo = {**policy.config["ppo"], "publish": published, "ema_decay": 0.99}
        assert (text in model_card(replace(policy, config={**policy.config, "ppo": ppo}))) == is_average
    earlier = {name: value for name, value in policy.config["ppo"].items() if name != "publish"}
    assert text not in model_card(replace(policy, config={**policy.config, "ppo": earlier}))


def test_the_card_says_what_of_a_multimodal_base_model_is_left_out(home: str, tmp_path: Path) -> None:
    policy = open_policy(MODEL, home)
    assert "Only the text part" not in model_card(policy)
    out = tmp_path / "sft"
    out.mkdir()
    (out / "file").touch()
    metrics = {"left_out_tensors": 439.0, "left_out_mib": 801.25}
    ref = policy.artifacts.publish("sft", "5" * 16, out, Provenance(metrics=metrics))
    tags = {**policy.version.tags, "rlhf.sft.key": ref.key, "rlhf.sft.digest": ref.digest}
    card = model_card(replace(policy, version=replace(policy.version, tags=tags)))
    assert "such as a vision tower (439 tensors, 801.2 MiB), are left out." in card


def test_the_licence_is_that_of_the_front_matter(home: str, tmp_path: Path) -> None:
    for text, licence in (
        ('---\nlicense: "mit"\n---\n', "mit"),
        ("---\r\ntags: [x]\r\nlicense: mit\r\n---\r\n", "mit"),
        ("---\nlicense:\nlanguage: en\n---\n", None),
        ("---\nlicense:\n- mit\n---\n", "mit"),
        ("---\nlicense:\n- mit\n- apache-2.0\ntags:\n- x\n---\n", "mit, apache-2.0"),
        ("---\nlanguage: en\n---\nlicense: none\n", None),
        ("# Base\nlicense: none\n---\n", None),
        ("---\nlicense: unknown\n---\n", None),
        ("---\nlicense: []\n---\n", None),
        ("---\nlicense: '[mit](http://a.example) <b>'\n---\n", None),
        ("---\nlicense: [mit, '# Heading']\n---\n", None),
        (f"---\nlicense: {'[' * 3000}\n---\n", None),
    ):
        (tmp_path / "README.md").write_bytes(text.encode())
        assert licence_of(tmp_path / "README.md") == licence


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_licence_of_a_hub_model_is_that_of_its_commit_in_the_cache(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    snapshot = tmp_path / "hub" / "models--owner--base" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    if is_cached:
        (snapshot / "README.md").write_text("---\nlicense: mit\n---\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    data = tmp_path / "hub" / "datasets--owner--rows" / "snapshots" / ("2" * 40)
    data.mkdir(parents=True)
    if is_cached:
        (data / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    sources = [{"field": "model", "path": "", "digest": f"hub:owner/base@{'1' * 40}"}]
    sources += [
        {"field": field, "path": "owner/rows", "digest": f"hub:owner/rows@{'2' * 40}:train[:10%]"}
        for field in ("data.sft[0]", "data.prompts[0]")
    ]
    sources.append({"field": "data.preference[0]", "path": "a/own.jsonl", "digest": "d" * 64})
    policy = with_files(open_policy(MODEL, home), tmp_path, data=json.dumps({"sources": sources}))
    config = {**policy.config, "model": {**policy.config["model"], "path": "owner/base"}}
    card = model_card(replace(policy, config=config))
    assert f"- Base model: {'mit' if is_cached else 'unknown'}\n" in card
    assert card.count(f"- Data `owner/rows`: {'cc-by-4.0' if is_cached else 'unknown'}\n") == 1
    assert "- Data `own.jsonl`: unknown\n" in card
    assert "base_model: owner/base\n" in card


def test_the_card_has_all_comparisons(home: str, tmp_path: Path) -> None:
    rate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    fallen = {"ppo": rate, "difference": {"ppo": {"mean": -0.1, "low": -0.2, "high": 0.0}}, "margin": 0.02}
    over_chosen = {"ppo": rate}
    evaluation = EVALUATION | {
        "policies": {"ppo": OF_PPO | {"win_rate_length_controlled": rate}},
        "over_chosen": {"win_rate": over_chosen, "win_rate_length_controlled": over_chosen},
        "regression": {"maths": fallen},
    }
    card = model_card(with_files(open_policy(MODEL, home), tmp_path, evaluate=json.dumps(evaluation)))
    assert "| the same, length-controlled | 0.500 | [0.4, 0.6] |" in card
    assert "| win rate over the data's answers | 0.500 | [0.4, 0.6] |" in card
    assert "| regression set maths, change (failed) | -0.1 | [-0.2, 0] |" in card


def test_an_evaluation_of_an_earlier_release_is_not_in_the_card(
    home: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = with_files(open_policy(MODEL, home), tmp_path, evaluate=json.dumps(OF_PPO))
    assert "The evaluation is not in the store any more." in model_card(policy)
    assert "was evaluated by an earlier release" in caplog.text


def with_files(policy: RegisteredPolicy, folder: Path, **files: str) -> RegisteredPolicy:
    """Return the policy with another data card or evaluation."""

    class Changed(RegisteredPolicy):
        def stage(self, stage: StageName) -> Path | None:
            return folder if stage in files else super().stage(stage)

    names = {"data": "data_card.json", "evaluate": "evaluation.json"}
    for stage, text in files.items():
        (folder / names[stage]).write_text(text)
    return Changed(**{name: getattr(policy, name) for name in policy.__dataclass_fields__})


@pytest.mark.parametrize(
    ("path", "digest", "name", "on_hub"),
    [
        ("/secret/place/base", "e" * 64, "base", False),
        ("secret/base", "e" * 64, "base", False),
        ("owner/base", "hub:owner/base@1", "owner/base", True),
        ("/secret/place/base/", None, "base", False),
        ("owner/base", None, "owner/base", True),
    ],
)
def test_a_card_names_no_folders_and_buckets(
    home: str, tmp_path: Path, path: str, digest: str | None, name: str, on_hub: bool
) -> None:
    sources = [
        {"field": "data.sft[0]", "path": "s3://secret-bucket/place/a.jsonl", "digest": "d" * 64},
        {"field": "data.prompts[0]", "path": "owner/rows", "digest": "hub:owner/rows@1:train"},
    ]
    if digest is not None:
        sources.append({"field": "model", "path": "", "digest": digest})
    policy = with_files(open_policy(MODEL, home), tmp_path, data=json.dumps({"sources": sources}))
    config = {**policy.config, "model": {**policy.config["model"], "path": path}}
    reason = "there is no match (it cannot be served here (OSError: /secret/cache))"
    tags = {**policy.version.tags, "rlhf.gate": "no_match", "rlhf.gate_reason": reason}
    card = model_card(replace(policy, config=config, version=replace(policy.version, tags=tags)))
    assert "secret" not in card
    assert f"Base model: `{name}`," in card
    assert (f"base_model: {name}\n" in card) is on_hub
    assert "| data.sft[0] | `a.jsonl` | `dddddddddddddddddddddddd` |" in card
    assert "| data.prompts[0] | `owner/rows` | `hub:owner/rows@1:train` |" in card


def test_a_second_reward_model_is_in_the_card(home: str, tmp_path: Path) -> None:
    measure = {"ppo": {"mean": 1.5, "low": 1.0, "high": 2.0}}
    evaluation = json.dumps({**EVALUATION, "judge": "judge_model", "judge_model": measure})
    policy = with_files(open_policy(MODEL, home), tmp_path, evaluate=evaluation)
    tags = {**policy.version.tags, "rlhf.judge.key": "0" * 16, "rlhf.judge.digest": "f" * 64}
    card = model_card(replace(policy, version=replace(policy.version, tags=tags)))
    assert "| judge model | 1.5 | [1, 2] |" in card
    assert f"| judge | `{'0' * 16}` | `{'f' * 16}` |" in card


def test_an_adapter_is_published_as_a_part_of_the_weights(home: str, tmp_path: Path) -> None:
    policy = open_policy(MODEL, home)
    work = tmp_path / "artifact"
    shutil.copytree(policy.folder, work, copy_function=shutil.copyfile)
    (work / "adapter").mkdir()
    (work / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "artifacts/sft/x"}')
    adapted = replace(policy, folder=work, files=PolicyFiles(tmp_path / "sft", work / "adapter"))
    folder = publish(adapted, tmp_path / "out")
    assert weights_sha256(folder) == policy.weights
    assert not (folder / "adapter").exists(), "its base is not published"
    card = (folder / "README.md").read_text()
    assert "used the SFT model with a separate adapter, in `float32`" in card
    assert "separate adapter" not in model_card(policy)


def test_a_failed_copy_leaves_nothing(home: str, tmp_path: Path) -> None:
    """The data card is no JSON, so that there is no model card."""
    policy = with_files(open_policy(MODEL, home), tmp_path, data="{")
    with pytest.raises(json.JSONDecodeError):
        publish(policy, tmp_path / "out" / "x")
    assert not list((tmp_path / "out").iterdir())


def test_files_that_are_not_the_registered_ones_are_refused(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow, uri = Mlflow(f"sqlite:///{database}", "served"), f"sqlite:///{database}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for number in (1, 2):
        register_policy(mlflow, "altered", tmp_path / "store", tmp_path, number)
    mlflow.tag_version("altered", "1", {"rlhf.weights_sha256": "0" * 64})
    with pytest.raises(CorruptArtifact, match=r"but 0{64} is registered"):
        open_policy("altered@1", str(tmp_path))
    rollback(mlflow, "altered", "bad")
    with pytest.raises(InputError, match="version 2 of altered was revoked: bad"):
        open_policy("altered@2", str(tmp_path))
    [second] = [each for each in mlflow.versions("altered") if each.version == "2"]
    twin = mlflow.create_version(
        "altered", source=second.source, run_id=None, tags={WEIGHTS: second.tags[WEIGHTS]}, description=""
    )
    with pytest.raises(InputError, match=f"version {twin.version} .* policy as version 2, which was revoked"):
        open_policy(f"altered@{twin.version}", str(tmp_path))
    [file] = (tmp_path / "store").rglob("ppo/*1/*/policy/model.safetensors")
    file.chmod(0o600)
    file.write_bytes(b"0" * file.stat().st_size)
    with pytest.raises(CorruptArtifact, match=r"model\.safetensors"):
        open_policy("altered", str(tmp_path))
    foreign = mlflow.create_version("altered", source="s3://x/y", run_id=None, tags={}, description="")
    with pytest.raises(InputError, match="was not registered by this pipeline"):
        open_policy(f"altered@{foreign.version}", str(tmp_path))
