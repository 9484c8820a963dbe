"""Files that somebody else wrote never run code: models, tokenizers, artifacts, data, configurations.

Rules, each tested with a file that leaves a mark if its code runs, as it does without protection:
- a model whose config names code (`auto_map`) is loaded without it, or refused; its tokenizer likewise
- pickled weights are refused under any file name; so are weights that only pretend to be safetensors
- an artifact with a program or a pickle in it is neither published nor read, also where its manifest was made
  to fit
- links inside artifacts are refused on both sides, and what they point to is not read
- a program next to the data, or a pickle named like data, is not run
- no call in the source opens a door: remote code, unpickling, MLflow's model loaders, shells, `eval`
"""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.data import Source
from rlhf_core.data.sources import read_rows
from rlhf_core.errors import CorruptArtifact, DataError, InputError, ModelError
from rlhf_core.preflight import check
from rlhf_core.storage.artifacts import ArtifactStore, Provenance
from rlhf_core.storage.bundles import digest_of, hash_folder
from rlhf_core.storage.store import Store
from rlhf_core.system.files import json_sha256
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.source_tree import product
from tests.support.tiny_llama import save_tiny_llama

ROOT = Path(__file__).resolve().parents[3]
MARK = "it-ran"


class Evil:
    """Leaves the mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, (MARK, "w"))


PROGRAM = f"open({MARK!r}, 'w')\n"


@pytest.fixture(autouse=True)
def nothing_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield
    assert not Path(MARK).exists()


def test_the_planted_files_run_without_the_protection() -> None:
    pickle.loads(pickle.dumps(Evil())).close()
    assert Path(MARK).exists()
    Path(MARK).unlink()
    exec(compile(PROGRAM, "evil.py", "exec"))
    assert Path(MARK).exists()
    Path(MARK).unlink()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model with a real tokenizer."""
    from rlhf_core.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["a story of a fox. " * 3], 300)
    folder = save_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=1,
        vocab_size=len(tokenizer),
        bos_token_id=1,
        eos_token_id=2,
    )
    tokenizer.save_pretrained(folder)
    return folder


def planted(tiny: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the model with a program next to it and these entries in its `config.json`."""
    shutil.copytree(tiny, folder)
    (folder / "evil.py").write_text(PROGRAM + "class Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    return folder


CLASSES = (
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
    "AutoModel",
)
CODE = {"auto_map": {**dict.fromkeys(CLASSES, "evil.Evil"), "AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
ODD = {**CODE, "model_type": "evil", "architectures": ["Evil"], "tokenizer_class": "Evil"}


@pytest.mark.parametrize("changes", [CODE, ODD], ids=["a known architecture", "an unknown one"])
def test_code_that_a_model_brings_is_not_run(tiny: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    from rlhf_core.data.tokenizer import load_tokenizer
    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.score import load_score_model

    folder = planted(tiny, tmp_path / "m", **changes)
    warnings = check(config_from_tree({"model": {"path": str(folder)},
        "data": {"max_prompt_tokens": 8, "max_response_tokens": 8},
                                       "ppo": {"max_new_tokens": 8}}))  # fmt: skip
    assert any("auto_map" in text and "never run" in text for text in warnings)
    known = "model_type" not in changes
    for load in (load_policy, load_score_model):
        options: dict[str, Any] = {"dtype": "float32", "attention": "sdpa", "device": "cpu"}
        if known:
            assert load(folder, **options).lm.config.model_type == "llama"
        else:
            with pytest.raises(ModelError):
                load(folder, **options)
    try:
        assert type(load_tokenizer(str(folder))).__module__.startswith("transformers.")
    except ModelError as error:
        assert not known and "no tokenizer can be loaded" in error.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt", "adapter_model.bin"])
def test_pickled_weights_are_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    import torch

    from rlhf_core.models.policy import load_policy
    from rlhf_core.models.score import load_score_model

    folder = planted(tiny, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil()}, folder / name)
    with pytest.raises(InputError, match=r"can run code|no weights|is not safetensors"):
        check(config_from_tree({"model": {"path": str(folder)}}))
    for load in (load_policy, load_score_model):
        try:
            # Without safetensors the folder counts as a shape to start from, and the pickle is not looked at.
            load(folder, dtype="float32", attention="sdpa", device="cpu")
        except ModelError:
            continue
        assert name != "model.safetensors"


def published(store: Store, folder: Path, cache: Path) -> ArtifactStore:
    artifacts = ArtifactStore(store, cache)
    artifacts.publish("sft", "k", folder, Provenance())
    return artifacts


def forge(store: Store, uri: Path) -> None:
    """Make the manifest match the files of the folder, as somebody with access to the store can."""
    key = "artifacts/sft/k/manifest.json"
    content = json.loads(store.read_bytes(key) or b"")
    del content["checksum"]
    files = hash_folder(uri)
    content |= {"files": [entry.__dict__ for entry in files], "digest": digest_of(files)}
    store.put_bytes(key, json.dumps({**content, "checksum": json_sha256(content)}).encode())


@pytest.mark.parametrize(
    "name", ["model.pt", "a/weights.BIN", "tokenizer.pkl", "modeling.py", "op.so", "x.ckpt"]
)
def test_a_program_in_an_artifact_is_neither_published_nor_read(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "store")
    bad = tmp_path / "bad"
    (bad / name).parent.mkdir(parents=True)
    (bad / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="may run code"):
        published(store, bad, tmp_path / "cache")
    good = tmp_path / "good"
    good.mkdir()
    (good / "config.json").write_text("{}")
    artifacts = published(store, good, tmp_path / "cache")
    ref = artifacts.find("sft", "k")
    assert ref is not None
    place = Path(ref.uri, name)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(pickle.dumps(Evil()))
    forge(store, Path(ref.uri))
    with pytest.raises(CorruptArtifact, match="may run code"):
        ArtifactStore(store, tmp_path / "cache2").fetch(ref)
    assert ArtifactStore(store, tmp_path / "cache3").find("sft", "k") is None


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../secret", "..", "config.json"])
def test_a_link_in_an_artifact_is_refused_on_both_sides(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("s")
    store = Store(tmp_path / "store")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "link").symlink_to(target)
    with pytest.raises(InputError, match="is a symbolic link"):
        published(store, folder, tmp_path / "cache")
    (folder / "link").unlink()
    ref = published(store, folder, tmp_path / "cache").find("sft", "k")
    assert ref is not None
    Path(ref.uri, "link").symlink_to(target)
    with pytest.raises(CorruptArtifact):
        ArtifactStore(store, tmp_path / "cache2").fetch(ref)


def test_files_next_to_the_data_are_not_run_and_a_pickle_is_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.py").write_text(PROGRAM)
    (folder / "__init__.py").write_text(PROGRAM)
    (folder / "dataset_infos.json").write_text("[]")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    assert len(list(read_rows(Source(path=str(folder))))) == 1
    for name in ("rows.jsonl", "rows.parquet", "rows.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
        try:
            assert not any(getattr(row, "data", None) for row in read_rows(Source(path=str(tmp_path / name))))
        except DataError as error:
            assert name in error.message


def calls() -> Iterator[tuple[str, ast.Call]]:
    for module in product().modules.values():
        for node in module.nodes:
            if isinstance(node, ast.Call):
                yield f"{module.path.relative_to(ROOT)}:{node.lineno}", node


CLOSED = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load",
    "marshal.loads",
          "shelve.open", "tarfile.open", "shutil.unpack_archive", "zipfile.ZipFile", "numpy.load",
          "np.load"}  # fmt: skip


RUNS_NAMED_CODE = "rlhf_core/rewards/python_worker.py"
"""Runs the reward function that the configuration names, in a process of its own: the one place that executes
source.
"""


def test_no_call_opens_a_door() -> None:
    wrong = []
    for place, call in calls():
        name = ast.unparse(call.func)
        if name in ("exec", "compile") and place.startswith(f"{RUNS_NAMED_CODE}:"):
            continue
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name in CLOSED or options.get("shell") == "True" or options.get("allow_pickle") == "True":
            wrong.append(f"{place}: {name}")
        if options.get("trust_remote_code", "False") != "False":
            wrong.append(f"{place}: trust_remote_code")
        if name.endswith("load_model") and "mlflow" in name:
            wrong.append(f"{place}: {name}")
    assert wrong == []


def test_no_auto_class_trusts_remote_code() -> None:
    loaders = ("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained", "LLM")
    # `models.sharded` gives no folder to transformers, but tensors of safetensors files.
    models = ("AutoModelForCausalLM.from_pretrained",)
    found: dict[str, int] = {}
    for place, call in calls():
        name = next((known for known in (*loaders, *models) if ast.unparse(call.func) == known), None)
        if name is None:
            continue
        found[name] = found.get(name, 0) + 1
        options = {word.arg for word in call.keywords}
        assert "trust_remote_code" in options or None in options, (
            place
        )  # `**options`: the tests above load through it
        assert name not in models or "use_safetensors" in options, place
    assert set(found) == {*loaders, *models}


def test_a_stage_does_not_unpickle_with_any_environment() -> None:
    from rlhf_core.config import PipelineConfig
    from rlhf_core.executors.spec import stage_environment

    environment = stage_environment(PipelineConfig(), {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"})
    assert environment["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
