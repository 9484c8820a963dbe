"""`rlhf serve`: the command of vLLM's OpenAI-compatible server for a registered policy. `rlhf serve-reward`:
a reward model over HTTP with the protocol in `rlhf_core.rewards.remote`.

    POST /score --> token, size --> lock --> tokens --> forward passes --> scores
    GET /health

One request is scored at a time, in order of arrival. One whose client has gone is left out. Without a token,
the server listens on loopback only and refuses requests of web pages from other origins. An invalid item gets
`null` and a reason. An invalid request gets a status: 400, 401, 403, 413 or 415. Too many connections are
answered with 503, and a failed forward pass with 500, with its reason in the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhf_core.config.ppo_sections import engine_rank
from rlhf_core.data.tokenizer import TOKENIZER_FILES
from rlhf_core.engines.distributed import resolve_device
from rlhf_core.errors import ConfigError, InputError
from rlhf_core.evaluation.policy_files import adapter_rank
from rlhf_core.models.folder import ModelFolder
from rlhf_core.rewards.post import TOKEN_VARIABLE, reward_token
from rlhf_core.rewards.scorer import ItemError, Scorer
from rlhf_core.run.registered_policies import RegisteredPolicy
from rlhf_core.storage.artifacts import parse_artifact_address
from rlhf_core.system.home import Home
from rlhf_core.system.serving import API_KEY, OwnAddressOnly, bind, is_loopback
from rlhf_core.types import PromptAndResponse

_OWN_OPTIONS = (
    "host", "port", "uds", "model", "served-model-name", "lora-modules", "middleware", "api-key", "root-path",
    "allowed-origins", "config",
)  # fmt: skip
"""Options of vLLM that `rlhf serve` sets itself, and others that would bypass the rules about addresses."""


def serve_command(policy: RegisteredPolicy, host: str, port: int, more: Sequence[str] = ()) -> list[str]:
    """Return the command that serves the policy with vLLM's OpenAI-compatible server.

    The model is served as `NAME` and `NAME@VERSION`.

    Args:
        policy: The policy.
        host: Address to listen on. Others than loopback need VLLM_API_KEY.
        port: Port to listen on.
        more: Further arguments of vLLM.

    Raises:
        InputError: The address can be reached from other machines, and there is no key; or `more` has an
            option that is set here.
    """
    _check_options(more)
    names = [policy.name, f"{policy.name}@{policy.version.version}"]
    # Its precision is that in which PPO and the evaluation have sampled the policy. vLLM's default follows
    # from the files.
    engine = policy.config["ppo"]["engine"]
    command = [
        # Not `vllm serve`, which fails with the package for CPUs: that one is not named `vllm`.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy.files.model),
        "--host", host, "--port", str(port), "--dtype", str(engine["dtype"]),
    ]  # fmt: skip
    if is_loopback(host):
        # Web pages in a browser on this machine could send requests otherwise.
        command += ["--middleware", "rlhf_core.system.serving.OwnAddressOnly"]
    elif not os.environ.get(API_KEY):
        raise InputError(
            f"--host must be a loopback address without a key; got {host}; set {API_KEY}, here and for the"
            " clients"
        )
    if os.environ.get(API_KEY):
        command += ["--middleware", "rlhf_core.system.serving.KeyOnly"]
    if policy.files.adapter is None:
        command += ["--served-model-name", *names]
    else:
        rank = adapter_rank(policy.files.adapter)
        adapters = [f"{name}={policy.files.adapter}" for name in names]
        # Without the adapter it is the SFT model, which must not answer under the name of the policy.
        command += ["--served-model-name", f"{policy.name}-sft", "--enable-lora"]
        command += ["--max-lora-rank", str(engine_rank(rank)), "--lora-modules", *adapters]
    return [*command, *more]


def tokenizer_alone(policy: RegisteredPolicy, home: str | Path) -> Path:
    """Return a folder in the cache of `home` with links to the tokenizer's files of a policy, for
    `--tokenizer`.

    Beside some config.json, such as that of qwen2, transformers replaces parts of tokenizer.json by its own.
    """
    model = policy.files.model.resolve()
    # One for each model folder, so that repeated starts do not add others.
    # A path need not be UTF-8, and `str.encode` would refuse it then.
    digest = hashlib.sha256(os.fsencode(model)).hexdigest()[:16]
    folder = Home.of(home).make().cache / f"tokenizer-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        # The files behind the links may have moved since the last start.
        (folder / name).unlink(missing_ok=True)
        if (model / name).exists():
            (folder / name).symlink_to(model / name)
    return folder


def _check_options(more: Sequence[str]) -> None:
    for argument in more:
        if not argument.startswith("--"):
            continue
        # As vLLM reads it: `--served_model_name=x`, `--host.x` and abbreviations are options as well.
        option = argument.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-")
        own = [name for name in _OWN_OPTIONS if name.startswith(option)]
        if own:
            raise InputError(
                f"--vllm must not contain --{own[0]}, which rlhf serve decides; got --{option}; leave it out"
                " (--host and --port are options of rlhf serve, the key is in VLLM_API_KEY)"
            )


def serve_environment() -> dict[str, str]:
    """Return the variables of a vLLM server, where the environment does not have them."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    import torch

    if not torch.cuda.is_available():
        # VLLM_CPU_KVCACHE_SPACE is in GiB.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return variables | dict(os.environ)


# -- a reward model over HTTP --


Template = Literal["chat", "plain"]
Attention = Literal["sdpa", "eager"]

MAX_BYTES = 16 << 20
"""Maximum size of a request."""
MAX_ITEMS = 10_000
"""Maximum number of items of a request. The answer has an entry for each, and a reason for each item without
a score.
"""
# uvicorn answers each request with 503 once it has this number of connections, idle ones included.
_MAX_CONNECTIONS = 256


def serve_reward(
    address: str,
    *,
    host: str,
    port: int,
    home: Home,
    endpoint: str | None,
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
    # First: an address that cannot be used is reported before the model is fetched and loaded.
    bound, token = listen(host, port)
    with bound:
        folder, template = locate(address, home, endpoint)
        scorer = Scorer(
            folder,
            template=template,
            dtype=dtype,
            attention=attention,
            device=resolve_device(device, "--device"),
            micro_batch_tokens=micro_batch_tokens,
        )
        name, number = bound.getsockname()[:2]
        if ":" in name:  # IPv6
            name = f"[{name}]"
        ready(f"http://{name}:{number}/score")
        make_server(scorer, token).run(sockets=[bound])


def locate(address: str, home: Home, endpoint: str | None) -> tuple[Path, Template | None]:
    """Return the verified model folder of an artifact and the template of its data; or a folder as it is,
    and None.
    """
    found = parse_artifact_address(address.rstrip("/"))
    if found is None or found.stage != "reward":
        folder = Path(address)
        # The folder of an artifact has the model inside.
        inner = folder / "model"
        return (inner if ModelFolder(inner).has_config else folder), None
    artifacts = found.open_store(home, endpoint)
    ref = artifacts.find("reward", found.key)
    if ref is None:
        raise InputError(f"there is no reward artifact {found.key} in {found.store}; correct the address")
    template = artifacts.config(ref)["data"]["template"]
    return artifacts.fetch(ref) / "model", template


def listen(host: str, port: int) -> tuple[socket.socket, str | None]:
    """Return a bound socket, and the token that clients must send.

    Raises `ConfigError` for an unusable address, and without a token for an address other than loopback.
    """
    token = reward_token(guards=True)
    bound = bind(host, port)
    # The address of the socket and not `host`, which can be a name that leads to any interface.
    address = str(bound.getsockname()[0]).partition("%")[0]
    if token is None and not ipaddress.ip_address(address).is_loopback:
        bound.close()
        raise ConfigError(
            f"--host must be a loopback address without a token; got {host}; set {TOKEN_VARIABLE}, here and"
            " for the clients"
        )
    return bound, token


def make_server(scorer: Scorer, token: str | None) -> uvicorn.Server:
    """Return the server; run it with the socket of `listen`."""
    app = make_app(scorer, token)
    return uvicorn.Server(
        uvicorn.Config(
            # With a token, web pages cannot send valid requests.
            OwnAddressOnly(app) if token is None else app,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            # Without a limit, uvicorn waits at the end for a client that does not finish sending its request.
            timeout_graceful_shutdown=5,
        )
    )


def make_app(scorer: Scorer, token: str | None) -> Starlette:
    """Return the application. Clients must send `token`, unless it is None."""
    # The memory of the whole process is limited while a chat template is rendered, so no forward pass may
    # run at that time.
    lock = asyncio.Lock()

    async def score(request: Request) -> Response:
        _check_token(request, token)
        items = await _items(request)
        async with lock:
            # A client that has given up while it waited needs no score.
            if await request.is_disconnected():
                raise HTTPException(400, "the request broke off")
            # In a thread, so that `/health` and disconnections are answered during a forward pass.
            return JSONResponse(await asyncio.to_thread(score_items, scorer, items))

    # Without a token: load balancers ask it, and the answer says nothing.
    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code)

    return Starlette(
        routes=[Route("/score", score, methods=["POST"]), Route("/health", health)],
        exception_handlers={HTTPException: refuse},
    )


def score_items(scorer: Scorer, items: list[Any]) -> dict[str, Any]:
    """Return the answer to a request: a score or null for each item, and why items have none."""
    pairs: dict[int, PromptAndResponse] = {}
    errors: dict[str, str] = {}
    for index, item in enumerate(items):
        try:
            pairs[index] = scorer.encode(item)
        except ItemError as error:
            # The reason may contain text that cannot be encoded as JSON.
            errors[str(index)] = str(error).encode(errors="replace").decode()
    scores: list[float | None] = [None] * len(items)
    values = scorer.scores(list(pairs.values())) if pairs else []
    for index, value in zip(pairs, values, strict=True):
        # JSON has no NaN. Starlette refuses it, and the whole request would be answered with 500.
        if math.isnan(value):
            errors[str(index)] = "the model's score is not finite"
        else:
            scores[index] = value
    return {"scores": scores, "errors": errors}


def _check_token(request: Request, token: str | None) -> None:
    given = request.headers.get("authorization", "")
    # Bytes, because `compare_digest` raises TypeError for text that is not ASCII.
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(
            401, f"the token of this service must be sent; clients take it from {TOKEN_VARIABLE}"
        )


async def _items(request: Request) -> list[Any]:
    # Any web page can post text to loopback. JSON needs this server's consent (CORS), which it never gives.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the request must be application/json")
    body = bytearray()
    try:
        # Counted while it is read: a chunked request does not announce its size.
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BYTES:
                raise HTTPException(413, f"the request must have at most {MAX_BYTES} bytes; send fewer items")
    except ClientDisconnect:
        raise HTTPException(400, "the request broke off") from None
    try:
        items = json.loads(body)["items"]
    # RecursionError: thousands of nested lists. TypeError: JSON that is no object.
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise HTTPException(400, 'the request must be {"items": [...]}') from error
    if not isinstance(items, list):
        raise HTTPException(400, "items must be a list")
    if len(items) > MAX_ITEMS:
        raise HTTPException(413, f"the request must have at most {MAX_ITEMS} items; send fewer")
    return items
