"""`rlhf publish`: a registered policy in Hugging Face layout, with a model card made from its lineage.

publish         to a folder
publish_to_hub  to a repository of the Hugging Face hub
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

from rlhf_core.errors import InputError
from rlhf_core.ops.publish.card import model_card
from rlhf_core.run.registered_policies import RegisteredPolicy
from rlhf_core.system.files import TEMPORARY, delete_abandoned, held, write_atomic

_CARD = "README.md"
_UNFINISHED = f"{TEMPORARY}publish-"
"""Prefix of the names of folders that `publish` has not finished."""


def publish(policy: RegisteredPolicy, folder: Path) -> Path:
    """Write the model and `README.md` to `folder`, which appears when complete.

    An adapter is part of the model's weights. It is not copied, because its base model is not published. What
    a killed process has left next to the folder is deleted.

    Raises InputError if the folder has files, is a file or a link itself, or cannot be written.
    """
    if folder.is_symlink():
        raise InputError(f"{folder} is a link; name a folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} has files already; name another folder, or delete this one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
        with held(temporary):
            _write(policy, folder, temporary)
    except OSError as error:
        # `copytree` lists its errors as tuples of source, target and reason.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise InputError(
            f"{folder} cannot be written ({why}); free space there, or name another folder"
        ) from error
    finally:
        delete_abandoned(folder.parent, f"{_UNFINISHED}*")
    return folder


def _write(policy: RegisteredPolicy, folder: Path, temporary: Path) -> None:
    try:
        shutil.copytree(policy.folder / "policy", temporary, copy_function=shutil.copyfile)
        (temporary / _CARD).write_text(model_card(policy), encoding="utf-8")
        for path in (temporary, *temporary.rglob("*")):  # artifacts are read-only
            path.chmod(0o755 if path.is_dir() else 0o644)
        # This also replaces an empty folder.
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class OnHub(NamedTuple):
    """What `publish_to_hub` made."""

    address: str
    """URL of the commit."""
    private: bool | None
    """Whether only its owner can read the repository. None if the hub does not say."""


def publish_to_hub(policy: RegisteredPolicy, repository: str, *, replace: bool = False) -> OnHub:
    """Upload the model and its card to a repository of the hub, which is made private if it is new. All other
    files of the repository are deleted.

    The token is that of `hf auth login` or HF_TOKEN; HF_ENDPOINT names another hub.

    Args:
        policy: The policy.
        repository: `owner/name`.
        replace: Whether the files of a repository that has some are deleted.

    Raises:
        InputError: The name is not one of a repository, or the hub refuses or cannot be reached, or the
            repository has files.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    api = HfApi()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as temporary:
        folder = Path(temporary, "model")
        # Links, so that a kill leaves no copy of the weights.
        source = (policy.folder / "policy").absolute()
        shutil.copytree(source, folder, copy_function=os.symlink)
        write_atomic(folder / _CARD, model_card(policy))
        try:
            private: bool | None = True
            try:
                private = api.repo_info(repository).private
            except RepositoryNotFoundError:
                api.create_repo(repository, private=True)
            else:
                files = [name for name in api.list_repo_files(repository) if name != ".gitattributes"]
                if files and not replace:
                    raise InputError(
                        f"{repository} exists with {len(files)} files, and an upload deletes all of them;"
                        " name another repository, or use --replace"
                    )
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=f"{policy.name}, version {policy.version.version}, weights {policy.weights}",
                delete_patterns="*",  # files of an earlier version, such as further shards
            )
        except (httpx2.HTTPError, OSError, HFValidationError) as error:  # OSError: the offline mode
            raise InputError(f"{repository} cannot be written on the hub: {error}") from error
    return OnHub(commit.commit_url, private)
