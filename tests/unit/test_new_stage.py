"""The row of a new stage, as docs/change-it.md shows it.

- in a copy of the package with this row, the configuration passes the checks, and resources, imports and
  logged parameters of the stage are known
- the end of a run shows its findings
- no key of an existing configuration changes while the stage is not enabled
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.keys import pipeline_key, stage_key
from rlhf_core.config.load import load_config
from rlhf_core.pipeline import STAGES

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests/assets/tiny.yaml"

STAGE = '''
"""Stage `red_team`."""

from rlhf_core.types import Findings


def run(config, context):
    raise NotImplementedError


FINDINGS = Findings(
    read=lambda ref: {"score": ref.metrics["score"]},
    rows=lambda entry: [("red team", f"{entry['score']:.1f}")],
)
'''
SECTION = '''
class RedTeamConfig(Section):
    """Red team."""

    enabled: bool = result(False)
    n: PositiveInt = result(4)


class PipelineConfig(Section):
'''
SCRIPT = """
import json, sys
from types import SimpleNamespace
from rlhf_core.config.keys import pipeline_key, stage_key
from rlhf_core.config.load import load_config
from rlhf_core.pipeline import STAGES
from rlhf_core.run.checks import load_and_check
from rlhf_core.executors.spec import StageRecord, StageSpec
from rlhf_core.run.summary import results, summarize
from rlhf_core.types import ArtifactRef
from rlhf_core.engines import vllm
from rlhf_core.run import attempt

imported = []
attempt.importlib = SimpleNamespace(import_module=imported.append)
vllm.import_vllm = lambda *args: imported.append("vllm")
attempt.open_tracking = lambda config: SimpleNamespace(warm_up=lambda: None)
path, home = sys.argv[1:]
overrides = [f"run.home={home}", "red_team.enabled=true", "run.resources.red_team.nodes=3"]
config = load_and_check(path, overrides).config
attempt.import_for("red_team", config)
plain = load_config(path)
made = StageRecord(ArtifactRef("red_team", "key", "digest", "uri", {"score": 0.5}), 1.0, False)
summary = summarize({"red_team": made}, 1.0, {})
print(json.dumps({
    "file": attempt.__file__,
    "nodes": config.run.resources.of("red_team").nodes,
    "imported": imported,
    "summary": [summary["red_team"], results(summary)],
    "parameters": attempt._params(StageSpec("red_team", "key", config)),
    "plain": [pipeline_key(plain, {}), *(stage_key(plain, s, {}, {}) for s in STAGES if s != "red_team")],
    "enabled": pipeline_key(config, {}),
}))
"""


def row_of_the_page() -> str:
    """Return the row that docs/change-it.md shows, with a comma after it."""
    text = (ROOT / "docs/change-it.md").read_text(encoding="utf-8")
    found = re.search(r"^ *```python\n( *Stage\(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return textwrap.indent(textwrap.dedent(found.group(1)).rstrip(), "    ") + ",\n"


def insert(file: Path, before: str, text: str) -> None:
    content = file.read_text(encoding="utf-8")
    assert content.count(before) == 1
    file.write_text(content.replace(before, text + before), encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Change the places that docs/change-it.md names in a copy, and return what the script finds there."""
    copy = tmp_path_factory.mktemp("copy")
    package = copy / "rlhf_core"
    shutil.copytree(ROOT / "rlhf_core", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "stages/red_team.py").write_text(STAGE, encoding="utf-8")
    insert(package / "pipeline.py", '    Stage(\n        "register",', row_of_the_page())
    insert(package / "pipeline.py", '"register"\n]', '"red_team", ')
    pipeline = package / "config/pipeline.py"
    insert(
        pipeline,
        "    register_: RegisterConfig",
        "    red_team: RedTeamConfig = result(RedTeamConfig())\n",
    )
    text = pipeline.read_text(encoding="utf-8")
    pipeline.write_text(text.replace("class PipelineConfig(Section):\n", SECTION.lstrip()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(CONFIG), str(copy / "home")],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "MLFLOW_TRACKING_URI": "http://localhost:9"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(result["file"]).is_relative_to(copy)
    return result


def test_the_row_is_all_that_resources_imports_and_parameters_need(found: dict[str, Any]) -> None:
    assert found["nodes"] == 3
    assert found["imported"] == ["pyarrow.parquet", "transformers.models.llama.modeling_llama", "vllm"]
    parameters = found["parameters"]
    assert parameters["red_team.enabled"] is True and "red_team.n" not in parameters, "a default"
    assert "ppo.steps" not in parameters


def test_the_end_of_a_run_shows_the_findings_of_a_new_stage(found: dict[str, Any]) -> None:
    assert found["summary"] == [{"score": 0.5}, [["red team", "0.5"]]]


def test_a_new_stage_that_is_not_enabled_changes_no_key(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:9")
    config = load_config(str(CONFIG))
    before = [pipeline_key(config, {}), *(stage_key(config, stage, {}, {}) for stage in STAGES)]
    assert found["plain"] == before
    assert found["enabled"] != before[0]
