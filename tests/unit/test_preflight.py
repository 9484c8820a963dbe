"""What is looked at before anything heavy starts.

Rules: data files, the model's folder, addresses, folders, reward functions and devices that cannot work
are refused with the class of error that fits, all at once and quickly; what may work is a warning; secrets
are not shown; nothing of the user's is executed.
"""

from __future__ import annotations

import gzip
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.config.keys import stages_made
from rlhf_core.errors import ConfigError, DataError, InputError
from rlhf_core.pipeline import StageName, stages_between
from rlhf_core.planning.check import check_devices, check_disk
from rlhf_core.preflight import check, check_environment
from rlhf_core.rewards.check import module_file
from rlhf_core.system.machine import Disk
from tests.support.demo_data import config_with_demo_data as config_from_tree
from tests.support.model_folder import model_folder
from tests.support.scripted_machine import ScriptedMachine, on_machine
from tests.support.users import as_unprivileged_user

ROW = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'


@pytest.fixture(autouse=True)
def on_two_cores_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with on_machine(ScriptedMachine(cores=2)):
        yield


def with_gpus(count: int) -> ScriptedMachine:
    return ScriptedMachine(gpus=["NVIDIA H100 80GB HBM3"] * count)


def config(*overrides: str, **tree: Any) -> PipelineConfig:
    return config_from_tree(tree, overrides=overrides)


def refused(config: PipelineConfig, kind: type[InputError]) -> str:
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        check(config)
    assert time.monotonic() - start < 20
    assert type(caught.value) is kind
    assert "Traceback" not in caught.value.message
    return caught.value.message


def test_the_default_configuration_passes_without_a_warning() -> None:
    assert check(config()) == []


def test_files_that_can_be_read_pass(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf\r\n\r\n" + ROW)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(ROW))
    (tmp_path / "c.json").write_bytes(b"[" + ROW + b"]")
    (tmp_path / "d.csv").write_text("prompt,chosen\na,b\n")
    (tmp_path / "e.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    (tmp_path / "first-row-bad.jsonl").write_bytes(b"{oops\n" + ROW)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_bytes(ROW)
    names = [
        "a.jsonl",
        "./b.jsonl.gz",
        str(tmp_path / "c.json"),
        "d.csv",
        "e.parquet",
        "first-row-bad.jsonl",
        "folder",
    ]
    assert check(config(data={"preference": [{"path": name} for name in names]})) == []


def test_every_file_of_a_folder_is_opened_and_the_first_bad_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for number in range(20):
        content = b"{oops\n" if number > 14 else ROW
        (tmp_path / "folder" / f"part-{number:02d}.jsonl").write_bytes(content)
    message = refused(config(data={"preference": [{"path": "folder"}]}), DataError)
    assert [line.partition("part-")[2][:2] for line in message.splitlines()] == ["15", "16", "17"]


def test_hub_ids_are_warned_about_unless_pinned() -> None:
    pinned = config(
        model={"path": "owner/name", "revision": "abc"},
        data={"sft": [{"path": "owner/set", "revision": "abc"}]},
    )
    assert check(pinned) == []
    loose = check(config(model={"path": "owner/name"}, data={"sft": [{"path": "owner/set"}]}))
    assert len(loose) == 2
    assert any("data.sft.0.revision" in text for text in loose)
    assert any("model.revision" in text for text in loose)


def test_a_whole_model_folder_passes(tmp_path: Path) -> None:
    assert check(config(model={"path": str(model_folder(tmp_path / "m"))})) == []


def test_sequences_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path / "m"))
    message = refused(config(model={"path": folder}, data={"max_prompt_tokens": 200}), ConfigError)
    assert "264 tokens" in message
    assert "context of 256" in message
    assert check(config(model={"path": folder}, data={"max_prompt_tokens": 192})) == []


def test_a_template_of_ones_own_makes_up_for_a_missing_one(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path / "m", tokenizer_config__json={}))
    assert check(config(model={"path": folder}, data={"template": "plain"})) == []
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert check(config(model={"path": folder}, data={"chat_template": "t.jinja"})) == []
    (tmp_path / "blank.jinja").write_text(" \n")
    assert "is empty" in refused(config(data={"chat_template": "blank.jinja"}), ConfigError)
    assert "file not found" in refused(config(data={"chat_template": "none.jinja"}), ConfigError)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with as_unprivileged_user():
        assert "is not writable for this user" in refused(config(), ConfigError)
    tmp_path.chmod(0o755)
    assert check(config()) == []


def test_credentials_in_an_address_are_refused_and_not_shown() -> None:
    base = PipelineConfig().model_dump(mode="json", by_alias=True)
    base["store"]["url"] = "s3://key:hunter2@bucket/x"
    by_hand = PipelineConfig.model_validate_json(json.dumps(base))
    assert "hunter2" not in refused(by_hand, ConfigError)


def test_little_disk_space_is_a_warning() -> None:
    with on_machine(ScriptedMachine(disk=Disk(total=10**9, free=4 * 10**7))):
        warnings = check(config())
    assert len(warnings) == 1
    assert "0.0 GB free" in warnings[0]
    with on_machine(ScriptedMachine(disk=Disk(total=10**9, free=10**6))):
        assert "1 MB free; databases and logs alone need 30 MB" in refused(config(), ConfigError)


def test_the_space_for_checkpoints_is_that_of_the_plan() -> None:
    tiny = {"hidden_size": 1024, "intermediate_size": 4096, "heads": 8, "layers": 8, "vocab_size": 32_000}
    # Adapters are small, so that another stage needs most.
    for ppo, stage, needed in (({}, "ppo", "16.2"), ({"lora": {"r": 8}}, "reward", "8.2")):
        kept = config(model={"tiny": tiny}, ppo=ppo, store={"keep_checkpoints": 3})
        with on_machine(ScriptedMachine(disk=Disk(total=10**12, free=3 * 10**8))):
            [warning] = check_disk(kept)
        assert f"4 checkpoints of the stage {stage} need about {needed} GB" in str(warning)
    with on_machine(ScriptedMachine(disk=Disk(total=10**12, free=10**8))):
        [warning] = check_disk(config(model={"path": "hub/model"}))
    assert "logs and small files need about 0.2 GB" in str(warning)


def test_a_reward_function_is_found_without_running_its_module(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("open('ran', 'w')\n")
    (tmp_path / "pack" / "mine.py").write_text(
        "open('ran', 'w')\ndef score(samples): return [0.0 for _ in samples]\n"
    )
    for reward in (
        {"type": "python", "function": "pack.mine:score"},
        {"type": "python", "function": "x:score", "file": "pack/mine.py"},
        {"type": "python", "function": "yaml:safe_load"},
    ):
        assert (
            check(
                config(
                    ppo={"rewards": [reward], "publish": "last"},
                    reward={"enabled": False},
                    data={"preference": []},
                )
            )
            == []
        )
    assert not (tmp_path / "ran").exists()


def test_module_is_found_where_an_import_finds_it(tmp_path: Path) -> None:
    source = tmp_path / "elsewhere" / "pack"
    (source / "part").mkdir(parents=True)
    (source / "__init__.py").write_text("open('ran', 'w')\n")
    (source / "part" / "mine.py").write_text("open('ran', 'w')\n")

    class Finder:
        """As of an editable installation."""

        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            assert (path is None) == ("." not in name)
            return spec_from_file_location(name, source / "__init__.py") if name == "editable" else None

    sys.meta_path.append(Finder)
    try:
        # `part` is a namespace package, which has no file.
        assert module_file("editable.part.mine") == source / "part" / "mine.py"
        assert module_file("editable") == source / "__init__.py"
        assert module_file("editable.part") is None and module_file("editable.none") is None
    finally:
        sys.meta_path.remove(Finder)
    assert not (tmp_path / "ran").exists()


def test_what_may_be_a_mistake_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(ROW)
    assert "only judges" in check(config("ppo.rewards=[{type: gold}]", "ppo.publish=last"))[0]
    assert (
        "demo task only"
        in check(config("ppo.rewards.1.type=gold", data={"prompts": [{"path": "p.jsonl"}]}))[0]
    )
    assert "come twice" in check(config("ppo.prompts_per_step=1100"))[0]
    assert "take turns" in check(config("ppo.engine.count=3"))[0]
    assert "sft.deepspeed.ranks is 8 on 2 CPU cores" in check(config("sft.deepspeed.ranks=8"))[0]
    assert "evaluate.ranks is 8 on 2 CPU cores" in check(config("evaluate.ranks=8"))[0]
    (engines,) = check(config("evaluate.engines=3", "ppo.engine.kv_cache_gib=0.1"))
    assert "evaluate.engines is 3 on 2 CPU cores" in engines


def test_engines_of_the_evaluation_need_memory_too() -> None:
    message = refused(config("evaluate.engines=20"), ConfigError)
    assert "20 engines (evaluate.engines) x 1 GiB = 20 GiB must fit in memory" in message


@pytest.mark.parametrize(
    ("processor", "is_slow"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", True),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16 amx_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : avx512f", True),
    ],
)
def test_bfloat16_is_named_where_the_cpu_is_slower_with_it(
    tmp_path: Path, processor: str, is_slow: bool
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(processor)
    with on_machine(ScriptedMachine(root=tmp_path)):
        found = check(config("ppo.engine.dtype=bfloat16", "ppo.policy_deepspeed.dtype=bfloat16"))
    named = [
        text for text in found if "ppo.policy_deepspeed.dtype, ppo.engine.dtype: bfloat16 is slower" in text
    ]
    assert len(named) == is_slow


def test_too_few_gpus_are_refused_with_the_arithmetic() -> None:
    with on_machine(with_gpus(4)):
        wide = config(
            ppo={"policy_deepspeed": {"ranks": 2}, "critic_deepspeed": {"ranks": 2}, "engine": {"count": 4}}
        )
        message = refused(wide, ConfigError)
        assert "sft.deepspeed.ranks" in refused(config("sft.deepspeed.ranks=8"), ConfigError)
    assert (
        "needs 8 GPUs (2 policy + reference, 2 critic + reward model, 4 engines = 8; colocate=pairs); got 4"
        in message
    )
    with on_machine(with_gpus(8)):
        assert check(wide) == []


LATER = "; only stages that this run has passed, or does not come to, need it"


@pytest.mark.parametrize(
    ("start", "until", "more", "errors"),
    [
        ("data", "data", [], []),
        ("data", "sft", [], ["sft.deepspeed.ranks"]),
        ("data", "reward", [], ["sft.deepspeed.ranks", "reward.deepspeed.ranks"]),
        ("judge", "judge", [], ["reward.deepspeed.ranks"]),
        ("ppo", "ppo", [], ["ppo"]),
        # PPO with an adapter measures its files on the ranks of the evaluation.
        ("ppo", "ppo", ["ppo.lora={}"], ["ppo", "evaluate.ranks"]),
        ("sample", "sample", [], []),
        ("sample", "sample", ["sample={}"], ["evaluate.ranks", "evaluate.engines"]),
        ("register", "register", [], ["evaluate.ranks", "evaluate.engines"]),
    ],
)
def test_gpus_that_the_run_does_not_come_to_are_a_warning(
    start: StageName, until: StageName, more: list[str], errors: list[str]
) -> None:
    wide = config(
        "sft.deepspeed.ranks=2",
        "reward.deepspeed.ranks=2",
        "reward.judge={fraction: 0.5}",
        "ppo.engine.count=2",
        "evaluate.ranks=2",
        "evaluate.engines=2",
        *more,
    )
    fields = ["sft.deepspeed.ranks", "reward.deepspeed.ranks", "evaluate.ranks", "evaluate.engines", "ppo"]
    with on_machine(with_gpus(1)):
        found = list(check_devices(wide, stages_made(wide, start, until)))
    refusals = [finding.message for finding in found if isinstance(finding, ConfigError)]
    warnings = [finding for finding in found if isinstance(finding, str)]
    assert [message.partition(":")[0] for message in refusals] == [each for each in fields if each in errors]
    assert [message.partition(":")[0] for message in warnings] == [
        each for each in fields if each not in errors
    ]
    assert all(message.endswith(LATER) for message in warnings)


@pytest.mark.parametrize(
    ("overrides", "until"),
    [
        (["ppo.weight_sync.backend=nccl"], "reward"),
        (
            [
                "ppo.engine.sleep_level=1",
                "ppo.policy_deepspeed.zero_stage=1",
                "ppo.critic_deepspeed.zero_stage=1",
                "ppo.colocate=all",
            ],
            "reward",
        ),
        (["ppo.policy_deepspeed={dtype: float16, zero_stage: 1}"], "reward"),
        (["ppo.engine.count=600"], "reward"),
        (["evaluate.engines=600"], "ppo"),
    ],
)
def test_without_gpus_settings_of_later_stages_are_a_warning(overrides: list[str], until: StageName) -> None:
    wanted = config(*overrides)
    assert any(isinstance(finding, ConfigError) for finding in check_devices(wanted))
    warnings = [str(finding) for finding in check_devices(wanted, stages_between("data", until))]
    assert sum(warning.endswith(LATER) for warning in warnings) == 1


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ("ppo.policy_deepspeed={dtype: float16, zero_stage: 1}", "sample"),
        ("ppo.policy_deepspeed={dtype: float16, zero_stage: 1}", "register"),
        ("reward.deepspeed={dtype: float16, zero_stage: 1}", "evaluate"),
    ],
)
def test_a_precision_without_gpus_is_an_error_of_stages_that_score_in_it(
    settings: str, stage: StageName
) -> None:
    with pytest.raises(ConfigError, match=r"dtype: float16 needs a GPU"):
        check(config(settings), stages=[stage])


def test_devices_of_a_ray_cluster_are_not_those_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        assert check(config("run.device=cuda")) == []
        (warning,) = check(config("run.device=auto"))
        assert "set cuda to use those of the cluster" in warning
        with on_machine(with_gpus(2)):
            wide = config("ppo.policy_deepspeed.ranks=4", "sft.deepspeed.ranks=4", "evaluate.engines=4")
            assert check(wide) == []
    monkeypatch.delenv("RAY_ADDRESS")
    with on_machine(with_gpus(2)):
        for field in ("ppo", "sft.deepspeed.ranks", "evaluate.engines"):
            assert f"{field}: " in refused(wide, ConfigError)


@pytest.mark.parametrize(
    ("installed", "chosen", "count"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "-1", 0),
        (4, "0,2", 2),
        (4, "0,7", 1),
        (4, "1,-1,2", 1),
        (2, "0,9,1", 1),
        (2, "0,0", 0),
        (2, "0, 00", 0),
        (2, "-2,0", 0),
        (2, "0,,1", 1),
        (2, "1gpu,none,0", 1),
        (2, "GPU-a,0,GPU-b", 1),
        (2, "GPU-a,GPU-a", 0),
        (1, "MIG-a,MIG-b", 2),
        (0, "0", 0),
    ],
)
def test_visible_gpus_are_counted_as_cuda_would(
    monkeypatch: pytest.MonkeyPatch, installed: int, chosen: str | None, count: int
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert with_gpus(installed).visible_gpus() == count


def test_a_cpu_build_of_torch_sees_no_gpu() -> None:
    machine = ScriptedMachine(gpus=["NVIDIA L40S"], torch="cpu")
    assert (machine.gpu_names(), machine.visible_gpus()) == (["NVIDIA L40S"], 0)


def test_gpus_are_counted_and_named_by_the_files_of_the_driver(tmp_path: Path) -> None:
    for number, name in enumerate(("NVIDIA A100-SXM4-40GB", "NVIDIA L40S")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 1\n")
    machine = ScriptedMachine(gpus=["one that nvidia-smi lists"], root=tmp_path)
    assert machine.gpu_names() == ["NVIDIA A100-SXM4-40GB", "NVIDIA L40S"]
    assert machine.visible_gpus() == 2


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": ""}, 2),
    ],
)
def test_gpus_of_amd_are_counted_with_a_build_for_rocm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], count: int
) -> None:
    for node, version in enumerate((0, 90402, 90010)):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count 8\ngfx_target_version {version}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = ScriptedMachine(torch="rocm", root=tmp_path)
    assert machine.gpu_names() == ["AMD gfx942", "AMD gfx90a"]
    assert machine.visible_gpus() == count
    assert ScriptedMachine(torch="cuda", root=tmp_path).visible_gpus() == 0


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    message = refused(
        config(
            "run.device=cuda",
            model={"path": "/nowhere"},
            data={"sft": [{"path": "no.jsonl"}], "chat_template": "no.jinja"},
            store={"url": "gs://x"},
        ),
        ConfigError,
    )
    fields = [line.split(":")[0] for line in message.splitlines()]
    assert fields == ["store.url", "data.sft.0.path", "data.chat_template", "model.path", "run.device"]


def test_flash_attention_passes_on_gpus_where_it_is_installed() -> None:
    with on_machine(ScriptedMachine(gpus=["NVIDIA H100 80GB HBM3"] * 8, packages=["flash_attn"])):
        check(config("model.attention=flash_attention_2"))
        check(config("model.attention=flash_attention_2", "run.device=cuda"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "folder"])
def test_prompts_without_the_answer_that_a_reward_needs_are_refused(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"What is {number} + 1?", "result": "2"} for number in range(30)]
    file = tmp_path / name / "a.jsonl" if name == "folder" else tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def with_source(**source: Any) -> PipelineConfig:
        data = {"prompts": [{"path": str(tmp_path / name), **source}]}
        return config(data=data, ppo={"rewards": [{"type": "model"}, {"type": "answer"}]})

    message = refused(with_source(), DataError)
    assert "data.prompts.0.path: type answer needs the field 'answer' in every prompt row" in message
    assert "have none" in message and "whose fields are result); add it, or set `field`" in message
    assert check(with_source(rename={"result": "answer"})) == []
    assert check(with_source(split="test", only_split=True)) == []  # the stage `data` reads more rows


def test_the_demo_has_no_answers() -> None:
    answers = {"rewards": [{"type": "answer"}]}
    assert "the field 'answer' in every prompt row" in refused(config(ppo=answers), DataError)


def test_a_user_without_a_home_is_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert check(config()) == []
    monkeypatch.delenv("HOME")
    message = refused(config(), ConfigError)
    assert (
        message == f"HOME: must name a folder, because this machine has no user with the id {os.getuid()}; "
        "got nothing; set it"
    )


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_missing_folder_for_temporary_files_must_be_one_that_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    monkeypatch.setenv(name, str(scratch / "job"))
    assert list(check_environment(config())) == []
    scratch.chmod(0o555)
    with as_unprivileged_user():
        (found,) = check_environment(config())
    assert str(found).startswith(f"{name}: '{scratch}/job' cannot be used: ")
    assert "is not writable for this user; choose another folder" in str(found)


def test_the_share_of_answers_that_nothing_can_reach_is_named_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"

    def with_answers(bad: int, **data: Any) -> PipelineConfig:
        answers = [{"style": "rule", "ground_truth": "2"}] * bad + ["2"] * (100 - bad)
        rows = [{"prompt": f"What is {i} + 1?", "answer": each} for i, each in enumerate(answers)]
        file.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
        return config(
            data={"prompts": [{"path": str(file)}], **data},
            ppo={"rewards": [{"type": "model"}, {"type": "answer"}]},
        )

    assert check(with_answers(0)) == []
    (warning,) = check(with_answers(5))
    assert warning.startswith("data.prompts.0.path: type answer: no response can get the reward for 5 of 100")
    message = refused(with_answers(6), DataError)
    assert "6 of 100 prompts (6.0%)" in message and "data.max_bad_rows=0.05" in message
    assert "such as `reward_model.ground_truth`" in message
    assert len(check(with_answers(100, max_bad_rows=1.0))) == 1


def test_a_reward_file_may_declare_its_encoding_as_in_python(tmp_path: Path) -> None:
    reward = {"type": "python", "function": "x:score", "file": "r.py"}
    given = config(ppo={"rewards": [{"type": "model"}, reward]})
    code = "# -*- coding: latin-1 -*-\nWORD = 'für'\ndef score(responses): return [0.0]\n"
    (tmp_path / "r.py").write_bytes(code.encode("latin-1"))
    assert check(given) == []
    (tmp_path / "r.py").write_bytes(b"\n" + code.partition("\n")[2].encode("latin-1"))
    assert "r.py:2 is not valid Python ((unicode error)" in refused(given, ConfigError)


@pytest.mark.parametrize("order", [("final_number", "boxed"), ("boxed", "final_number")])
def test_of_several_rewards_of_one_answer_the_strictest_is_checked_once(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"Which letter is {i}?", "answer": "B"} for i in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [{"type": "answer", "name": each, "extract": each} for each in order]
    given = config(data={"prompts": [{"path": str(file)}]}, ppo={"rewards": [{"type": "model"}, *rewards]})
    assert refused(given, DataError).count("100 of 100 prompts") == 1


def test_missing_answers_count_as_answers_that_nothing_can_reach(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"

    def without_answers(missing: int, unreachable: int) -> PipelineConfig:
        answers = [None] * missing + [["2", "3"]] * unreachable + ["2"] * (100 - missing - unreachable)
        rows = [{"prompt": f"What is {i} + 1?", "answer": each} for i, each in enumerate(answers)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return config(
            data={"prompts": [{"path": str(file)}]}, ppo={"rewards": [{"type": "model"}, {"type": "answer"}]}
        )

    (warning,) = check(without_answers(2, 3))
    assert "no response can get the reward for 5 of 100" in warning
    assert "6 of 100 prompts (6.0%)" in refused(without_answers(3, 3), DataError)
    assert "needs the field 'answer' in every prompt row; 6 of 100 have none" in refused(
        without_answers(6, 0), DataError
    )


def test_a_dotted_field_and_lists_of_one_are_read_and_said(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"What is {i}?", "reward_model": {"truth": [f"${i}$"]}} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"type": "answer", "field": "reward_model.truth"}
    rewards = [{"type": "model"}, reward]
    (warning,) = check(config(data={"prompts": [{"path": str(file)}]}, ppo={"rewards": rewards}))
    assert "30 of 30 answers in the field 'reward_model.truth'" in warning and "['$0$'] as '0'" in warning
