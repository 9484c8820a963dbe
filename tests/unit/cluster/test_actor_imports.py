"""What the process of an actor does not import.

- packages that only DeepSpeed's autotuner, assisted generation and losses of object detection would use are
  not found
- both libraries find nothing missing without them
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
unused = {"mlflow", "sklearn", "scipy"}
print(sorted(unused & {name for name, module in sys.modules.items() if module is not None}))
"""


def test_an_actor_does_not_import_what_it_does_not_use(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ACTOR + LIBRARIES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
