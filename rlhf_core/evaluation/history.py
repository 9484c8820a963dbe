"""What PPO wrote per step (`metrics.jsonl` of its artifact), as columns for the plots."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlhf_core.errors import CorruptArtifact

Column = npt.NDArray[np.float64]


class History:
    """Step metrics in the order of steps; a step written twice (a replay after a crash) counts once, the
    later one.
    """

    def __init__(self, rows: list[dict[str, float]]) -> None:
        by_step = {int(row["step"]): row for row in rows}
        self._rows = [by_step[step] for step in sorted(by_step)]

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Column:
        """(steps,) values; NaN where a step has none."""
        return np.array([float(row.get(name, math.nan)) for row in self._rows], dtype=np.float64)

    def has(self, name: str) -> bool:
        """True if any step has a finite value of `name`."""
        return bool(np.isfinite(self.column(name)).any())

    def names(self, prefix: str) -> list[str]:
        """Metric names that start with `prefix`, sorted."""
        return sorted({name for row in self._rows for name in row if name.startswith(prefix)})


def read_history(path: Path) -> History:
    """Reads JSON lines; a missing file is an empty history. Raises `CorruptArtifact` naming the line."""
    rows: list[dict[str, float]] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(
                f"{path.name}:{number}: each line must be a JSON object with `step`; got {line[:60]!r}; run"
                " the ppo stage again"
            ) from error
        rows.append({name: float(value) for name, value in row.items() if isinstance(value, int | float)})
    return History(rows)
