"""The negative control of `tests.chaos`: a process that starts with this folder on its path forgets the KL
coefficient.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


class _Forgetful(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "rlhf_core.algo.kl":
            return None
        real = importlib.machinery.PathFinder.find_spec(name, path)
        assert real is not None and real.loader is not None
        self._loader = real.loader
        return importlib.machinery.ModuleSpec(name, self, origin=real.origin)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.AdaptiveKL.load_state_dict = lambda self, state: None


sys.meta_path.insert(0, _Forgetful())
