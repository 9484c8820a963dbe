"""A store that fails, pauses or is overtaken by another process at chosen operations.

    from rlhf_core.errors import StoreError
    from tests.support.scripted_store import ScriptedStore

    store = ScriptedStore(tmp_path / "store")
    store.before("put_file", StoreError("503"), call=3)  # the third file is not stored
    store.before("put_if_absent", lambda: publish_another(store), key="manifest.json")

The objects are files in a folder, with the commits, digests and fencing of every other store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import override

from rlhf_core.errors import CorruptArtifact
from rlhf_core.storage.bundles import hash_file
from rlhf_core.storage.store import Store

Operation = Literal[
    "put_file",
    "get_file",
    "put_bytes",
    "put_if_absent",
    "read_bytes",
    "size",
    "sizes",
    "folders",
    "delete",
]
"""Names of methods of `Store`. `exists` counts as `size`, `list` as `sizes`, and each key of `delete` and
`delete_prefix` as one `delete`.
"""


class StoreCall(NamedTuple):
    """An operation on one object or, for `sizes`, on a folder."""

    operation: Operation
    key: str


class ScriptedStore(Store):
    """A store in a folder, for tests.

    `delete_prefix` deletes the objects one by one in the order of their keys, as in a bucket.

    Args:
        folder: Folder of the objects.
        remote: Whether it behaves like a bucket: its files are not on this machine.

    Attributes:
        calls: all operations so far.
    """

    def __init__(self, folder: Path, *, remote: bool = False) -> None:
        super().__init__(folder)
        self.calls: list[StoreCall] = []
        self._remote = remote
        self._actions: list[_Action] = []
        # Files are stored in parallel.
        self._lock = threading.Lock()

    def before(
        self,
        operation: Operation,
        action: Callable[[], object] | Exception,
        *,
        key: str = "",
        call: int = 1,
        lasting: bool = False,
    ) -> None:
        """Do something before a later operation: raise an error, wait, or change the store.

        Args:
            operation: The operation.
            action: Called before it, or the error that it raises.
            key: Only operations with a key that ends with this text count.
            call: Which of these operations, counted from 1.
            lasting: Whether the action is repeated before each operation after that.
        """
        with self._lock:
            self._actions.append(_Action(operation, action, key, call, lasting))

    def reset(self) -> None:
        """Remove all actions."""
        with self._lock:
            self._actions.clear()

    @override
    def put_file(self, local: Path, key: str, *, link: bool = False, sha256: str | None = None) -> None:
        self._reach("put_file", key)
        if self._remote and sha256 is not None and hash_file(local) != sha256:
            raise CorruptArtifact(f"{local} has other content than its manifest says.")
        super().put_file(local, key, link=link and not self._remote)

    @override
    def get_file(self, key: str, local: Path, size: int | None = None) -> None:
        self._reach("get_file", key)
        super().get_file(key, local, size)

    @override
    def put_bytes(self, key: str, data: bytes) -> None:
        self._reach("put_bytes", key)
        super().put_bytes(key, data)

    @override
    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._reach("put_if_absent", key)
        return super().put_if_absent(key, data)

    @override
    def read_bytes(self, key: str) -> bytes | None:
        self._reach("read_bytes", key)
        return super().read_bytes(key)

    @override
    def size(self, key: str) -> int | None:
        self._reach("size", key)
        return super().size(key)

    @override
    def sizes(self, prefix: str) -> Mapping[str, int]:
        self._reach("sizes", prefix)
        return super().sizes(prefix)

    @override
    def folders(self, prefix: str) -> Sequence[str]:
        self._reach("folders", prefix)
        return super().folders(prefix)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._reach("delete", key)
            super().delete([key])

    @override
    def delete_prefix(self, prefix: str) -> None:
        self.delete(sorted(super().sizes(prefix)))
        super().delete_prefix(prefix)

    @override
    def local_path(self, key: str) -> Path | None:
        return None if self._remote else super().local_path(key)

    def _reach(self, operation: Operation, key: str) -> None:
        call = StoreCall(operation, key)
        with self._lock:
            self.calls.append(call)
            due = [action for action in self._actions if action.is_due(call)]
        # Without the lock: an action may wait for another thread, or use the store.
        for action in due:
            action.run()


@dataclass
class _Action:
    operation: Operation
    action: Callable[[], object] | Exception
    key: str
    """End of the keys that count."""
    left: int
    """Number of calls until the one before which it runs."""
    lasting: bool

    def is_due(self, call: StoreCall) -> bool:
        """Count `call`, and return whether the action runs before it."""
        if call.operation != self.operation or not call.key.endswith(self.key):
            return False
        self.left -= 1
        return self.left == 0 or (self.left < 0 and self.lasting)

    def run(self) -> None:
        if isinstance(self.action, Exception):
            raise self.action
        self.action()
