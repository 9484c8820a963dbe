"""`rlhf serve-reward`: from an artifact's address, or a folder, to a running service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rlhf_core.errors import InputError
from rlhf_core.models.folder import ModelFolder
from rlhf_core.storage.artifacts import parse_artifact_address
from rlhf_core.system.home import Home

Template = Literal["chat", "plain"]
Attention = Literal["sdpa", "eager"]


def serve_reward(
    address: str,
    *,
    host: str,
    port: int,
    home: Home,
    endpoint: str | None,
    template: Template | None,
    dtype: str,
    attention: Attention,
    device: str,
    micro_batch_tokens: int,
    ready: Callable[[str], None],
) -> None:
    """Serve the scores of a reward model until a signal arrives.

    Args:
        address: The model: a folder, or an artifact in a store.
        host: Address to listen on.
        port: Port to listen on; 0 for any.
        home: Cache of models from S3.
        endpoint: Endpoint of the S3 server, or None for AWS.
        template: How text requests are formatted; None for the template that the model was trained with.
        dtype: Precision of the model.
        attention: Implementation of attention.
        device: "auto", "cpu" or "cuda".
        micro_batch_tokens: Tokens per forward pass.
        ready: Called with the URL when the server listens.

    Raises:
        InputError: The model or the address cannot be used.
    """
    if micro_batch_tokens < 1:
        raise InputError(f"--micro-batch-tokens must be at least 1; got {micro_batch_tokens}")
    from rlhf_core.ops.serve_reward.server import listen, make_server

    # First: an address that cannot be used is reported before the model is fetched and loaded.
    socket, token = listen(host, port)
    with socket:
        folder, trained_as = locate(address, home, endpoint)
        from rlhf_core.engines.distributed import resolve_device
        from rlhf_core.rewards.scorer import Scorer

        scorer = Scorer(
            folder,
            template=template or trained_as,
            dtype=dtype,
            attention=attention,
            device=resolve_device(device, "--device"),
            micro_batch_tokens=micro_batch_tokens,
        )
        name, number = socket.getsockname()[:2]
        ready(f"http://{f'[{name}]' if ':' in name else name}:{number}/score")
        make_server(scorer, token).run(sockets=[socket])


def locate(address: str, home: Home, endpoint: str | None) -> tuple[Path, Template | None]:
    """Return the verified model folder of an artifact and the template of its data; or a folder as it is,
    and None.
    """
    found = parse_artifact_address(address.rstrip("/"))
    if found is None or found.stage != "reward":
        folder = Path(address)
        inner = folder / "model"
        return (inner if ModelFolder(inner).has_config else folder), None
    artifacts = found.open_store(home, endpoint)
    ref = artifacts.find("reward", found.key)
    if ref is None:
        raise InputError(f"there is no reward artifact {found.key} in {found.store}; correct the address")
    template = artifacts.config(ref)["data"]["template"]
    return artifacts.fetch(ref) / "model", template
