"""A checkpoint never runs code, also where its manifest was made to fit.

Locks: through the real DeepSpeed, every kind of evil pickle in every file of ZeRO-0 and ZeRO-2 checkpoints is
armed, is refused by name, and does not run, loaded as it is or converted for other ranks; the honest files
load before and after.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.evil_checkpoints import KINDS, ZERO_STAGES


def test_no_planted_pickle_runs(tmp_path: Path, summary_lines: list[str]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.integration.evil_checkpoints", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    # One file under ZeRO-0; under ZeRO-2 also that of the optimizer's states, both also on the way to other
    # ranks.
    assert len(answers) == (1 + 2 * 2) * len(KINDS) and len(ZERO_STAGES) == 2
    assert [answer for answer in answers if not answer["armed"]] == []
    assert [answer for answer in answers if answer["ran"]] == []
    wrong = [
        a
        for a in answers
        if not a["answer"].startswith("CorruptArtifact: ") or "may run code" not in a["answer"]
    ]
    assert wrong == []
    summary_lines.append(f"{len(answers)} planted pickles: 0 ran, all refused")
