"""Plants pickles that run code in real DeepSpeed checkpoints with matching manifests, and loads them: a
script for `test_checkpoint_pickles`, which prints nothing and leaves `answers.json`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig
from rlhf_core.engines.deepspeed import TrainingEngine
from rlhf_core.engines.distributed import Rank, join, leave
from rlhf_core.engines.sharding import note_ranks
from rlhf_core.errors import RLHFError
from rlhf_core.storage.bundles import FileEntry, digest_of, hash_file, read
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.store import Store
from rlhf_core.system.files import json_sha256
from tests.integration.deepspeed_step import model
from tests.support.checkpoints import keep

ZERO_STAGES = (0, 2)
WAYS = {0: (1,), 2: (1, 2)}
"""By stage: ranks that seem to have written the checkpoint. Another number than one makes it be converted."""


class Evil:
    """Creates the file `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (str(self.marker), "w"))


class EvilState(Evil):
    """The same, by way of the builtin that runs text."""

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.marker)!r}, 'w')",))


def torch_pickle(file: Path, honest: Any, marker: Path) -> None:
    torch.save(Evil(marker), file)


def beside_the_state(file: Path, honest: Any, marker: Path) -> None:
    torch.save({**honest, "more": EvilState(marker)}, file)


def legacy_format(file: Path, honest: Any, marker: Path) -> None:
    torch.save({**honest, "more": Evil(marker)}, file, _use_new_zipfile_serialization=False)


def plain_pickle(file: Path, honest: Any, marker: Path) -> None:
    file.write_bytes(pickle.dumps(EvilState(marker)))


KINDS: dict[str, Callable[[Path, Any, Path], None]] = {
    kind.__name__: kind for kind in (torch_pickle, beside_the_state, legacy_format, plain_pickle)
}


def main(root: Path) -> None:
    join(Rank(device="cpu"))
    answers = []
    for stage in ZERO_STAGES:
        optimizer = OptimizerConfig(warmup_ratio=0.0, schedule="constant")
        sizes = DeepSpeedConfig.model_validate({"zero_stage": stage})
        engine = TrainingEngine(model("policy"), sizes, optimizer, Rank())
        place = root / f"zero{stage}"
        engine.save_checkpoint(place / "state")
        store = Store(place / "store")
        CheckpointStore(store, "k", place / "work", keep(1)).save(1, place / "state")
        manifest = read(store, "checkpoints/k/step-00000001")
        assert manifest is not None
        folder = Path(store.uri(manifest.data))
        assert [load(engine, folder, ranks) for ranks in WAYS[stage]] == ["loaded"] * len(WAYS[stage])
        for path in sorted(folder.rglob("*.pt")):
            whole = path.read_bytes()
            honest = torch.load(path, weights_only=True)
            for (kind, plant), ranks in itertools.product(KINDS.items(), WAYS[stage]):
                marker = root / f"marker-{stage}-{path.stem}-{kind}-{ranks}"
                plant(path, honest, marker)
                armed = runs_without_care(path, marker)
                forge(store)
                found = CheckpointStore(store, "k", place / "work", keep(1)).latest()
                assert found is not None, "its hashes are right"
                answers.append(
                    {
                        "file": f"zero{stage}/{path.name}",
                        "kind": kind,
                        "armed": armed,
                        "answer": load(engine, found[1], ranks),
                        "ran": marker.exists(),
                    }
                )
            path.write_bytes(whole)
            forge(store)
        assert [load(engine, folder, ranks) for ranks in WAYS[stage]] == ["loaded"] * len(WAYS[stage])
    (root / "answers.json").write_text(json.dumps(answers))
    leave()


def load(engine: TrainingEngine, folder: Path, ranks: int) -> str:
    """What came of it: "loaded", or the error."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy)
    note_ranks(copy, ranks)
    try:
        engine.load_checkpoint(copy, copy.with_name("converted"))
    except RLHFError as error:
        return f"{type(error).__name__}: {error.message}"
    finally:
        shutil.rmtree(copy)
        shutil.rmtree(copy.with_name("converted"), ignore_errors=True)
    return "loaded"


def runs_without_care(path: Path, marker: Path) -> bool:
    """Whether the pickle does run code where nobody prevents it."""
    os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    with contextlib.suppress(RuntimeError):  # not what torch expected, but unpickled by then
        torch.load(path, weights_only=False)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    armed = marker.exists()
    marker.unlink(missing_ok=True)
    return armed


def forge(store: Store) -> None:
    """Make the manifest fit the files, as somebody with access to the store can."""
    key = "checkpoints/k/step-00000001/manifest.json"
    content = json.loads(store.read_bytes(key) or b"")
    del content["checksum"]
    for entry in content["files"]:
        path = Path(store.uri(f"checkpoints/k/step-00000001/{content['folder']}/{entry['path']}"))
        entry.update(size=path.stat().st_size, sha256=hash_file(path))
    content["digest"] = digest_of([FileEntry(**entry) for entry in content["files"]])
    store.put_bytes(key, json.dumps({**content, "checksum": json_sha256(content)}).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
