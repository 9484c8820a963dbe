"""What the process of an actor does not import.

- packages that only DeepSpeed's autotuner, assisted generation and losses of object detection would use are
  not found
- both libraries find nothing missing without them
- a rank computes intervals of pairs that are in groups, which need SciPy
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ACTOR = """
import sys
from pathlib import Path
from rlhf_core.cluster.rpc import Actor, ParticipantSpec
from rlhf_core.config.pipeline import TimeoutsConfig
Actor(ParticipantSpec("rank", Path(sys.argv[1]), TimeoutsConfig()))
"""
LIBRARIES = """
import deepspeed.launcher.runner, transformers.generation.candidate_generator, transformers.loss.loss_utils
print(sorted(set(Actor.unused) & {name for name, module in sys.modules.items() if module is not None}))
"""
INTERVAL = """
from rlhf_core.evaluation.statistics import win_rate
print(win_rate([1.0, 0.0, 1.0, 1.0], confidence=0.95, groups=["a", "a", "b", "c"]).mean)
"""


def last_line(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", ACTOR + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_an_actor_does_not_import_what_it_does_not_use(tmp_path: Path) -> None:
    assert last_line(LIBRARIES, tmp_path) == "[]"


def test_a_rank_computes_intervals_of_pairs_in_groups(tmp_path: Path) -> None:
    assert last_line(INTERVAL, tmp_path) == "0.75"
