"""The pipeline as a library, in a process that cannot import Prefect:

- the example of docs/python-api.md runs as it is printed
- its stages are those of the command line: the same run again reuses them
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.test_public_api import WITHOUT_PREFECT

ROOT = Path(__file__).resolve().parents[2]


def test_example_of_the_documentation_runs_without_prefect(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    config = tmp_path / "demo.yaml"
    demo = (ROOT / "deployments" / "configs" / "demo.yaml").read_text(encoding="utf-8")
    config.write_text(demo, encoding="utf-8")
    script = tmp_path / "example.py"
    code = example.replace("deployments/configs/demo.yaml", str(config))
    code = code.replace(
        '["run.seed=1"', f'["run.home={tmp_path}/home", "tracking.system_metrics=false", "run.seed=1"'
    )
    script.write_text(WITHOUT_PREFECT + code, encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PREFECT_"))
    }
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.splitlines()[-1].split())
    assert [answer[:2] for answer in answers] == [["data", "ran"], ["data", "reused"]]
    assert answers[0][2] == answers[1][2] and Path(answers[0][2]).is_dir()
