"""How far the parameters end apart after two optimizer steps on the same data, over all settings of the law
test:

    python -m tests.benchmarks.law_differences

Settings: the loss, 1 or 2 ranks, ZeRO 0 to 3, how many micro-batches, padded or packed. The reference of each
loss is one rank, ZeRO 0, one padded micro-batch (with an adapter: packed ones).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.integration.deepspeed_step import BY_MODE, largest_difference, reference_label, run_all


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = run_all(Path(folder))
    table = Table(title="Largest difference of a parameter, float32")
    for column in ("loss", "settings", "largest difference", "setting", "parameter"):
        table.add_column(column)
    for kind in ("sft", "policy", "value", "reward", "policy-lora", "value-lora", *BY_MODE):
        reference = results[reference_label(kind)]
        found = {
            name: largest_difference(weights, reference)
            for name, weights in results.items()
            if name.startswith(f"{kind}-ranks")
        }
        worst = max(found, key=lambda name: found[name])
        table.add_row(kind, str(len(found)), f"{found[worst][0]:.2g}", worst, found[worst][1])
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
