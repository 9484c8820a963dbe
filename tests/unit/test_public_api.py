"""The public names of `rlhf_core`:

- `__all__` lists every public name, sorted, and each can be imported
- `import rlhf_core` imports nothing heavy
- the API can be imported in a process that has no Prefect
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import rlhf_core

WITHOUT_PREFECT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("prefect", "flows", "rlhf_cli"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_lists_every_public_name_in_order() -> None:
    hidden = {"annotations", "importlib", "metadata", "TYPE_CHECKING", "Any"}
    public = {
        name
        for name, value in vars(rlhf_core).items()
        if not name.startswith("_") and name not in hidden and not isinstance(value, ModuleType)
    }
    assert public <= set(rlhf_core.__all__)
    assert rlhf_core.__all__ == sorted(rlhf_core.__all__)
    assert all(getattr(rlhf_core, name) is not None for name in rlhf_core.__all__)
    assert set(rlhf_core.__all__) <= set(dir(rlhf_core))


def test_import_of_the_package_is_light() -> None:
    loaded = run("import rlhf_core, sys; print(*sys.modules)").split()
    assert not {"pydantic", "torch", "mlflow", "prefect", "yaml"} & set(loaded)


def test_api_can_be_imported_without_prefect() -> None:
    names = ", ".join(name for name in rlhf_core.__all__ if name != "__version__")
    run(f"{WITHOUT_PREFECT}\nfrom rlhf_core import {names}\nassert 'prefect' not in sys.modules")
