"""The engines' side of weight sync: backends of vLLM's weight-transfer API that compute a checksum of each
received tensor.

vLLM imports this module in each worker of an engine (`worker_extension_cls`). The import registers the
backends: `rlhf_gloo` and `rlhf_files` are implemented here; `rlhf_nccl` and `rlhf_ipc` are those of vLLM with
checksums.

If LoRA is enabled in the engine, the tensors are those of an adapter. They are stored without a change of the
model, and `SyncExtension.load_adapter` passes them to vLLM's loader.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlhf_core.engines.sync.wire import (
    GlooSource,
    TensorSpec,
    folder_tensors,
    receive_buckets,
    tensor_checksum,
    typed_handles,
)
from rlhf_core.errors import ModelError
from rlhf_core.system.failpoints import failpoint


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is untyped here
    """Where the workers of an engine receive from."""

    sender: tuple[str, int]
    """Address and port of the sender."""
    rank_offset: int
    """Rank of the first worker of this engine in the sender's group."""
    world_size: int
    """Number of processes in the group."""
    bucket_bytes: int
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vllm is untyped here
    """The tensors of an update, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]  # vllm is untyped here
    """Receives packed buckets and loads them layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        address, port = init_info.sender
        self._source: GlooSource | None = GlooSource(
            address, port, rank, init_info.world_size, init_info.timeout
        )
        self._bucket_bytes = init_info.bucket_bytes

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.inbox = _Inbox(self.model, is_adapter=self.vllm_config.lora_config is not None)
        # vLLM moves the parameters to `meta` until new ones arrive. With an adapter, none arrive.
        if not self.inbox.is_adapter:
            _release_experts(self.model)
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends in torch.accelerator.synchronize(), which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        columns = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        specs = [TensorSpec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in columns]
        assert self._source is not None, "the engine is connected"
        for tensors in receive_buckets(self._source, specs, self._bucket_bytes):
            self.inbox.load_weights(tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.inbox.is_adapter:
            return
        # First, because the next line resets the counters.
        _require_experts(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        # Last: only now every layer has its tensors back.
        _repack_embeddings(self.model)

    def shutdown(self) -> None:
        self._source = None


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vllm is untyped here
    """The model folder that the weights are read from."""

    folder: str


class FilesReceiver(GlooReceiver):
    """Loads the weights of a model folder. It has no sender and is never initialized."""

    update_info_cls = FilesUpdateInfo

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        # On the device, where checksums of large models are faster.
        self.inbox.load_weights(
            (name, tensor.to(self.device)) for name, tensor in folder_tensors(Path(update_info.folder))
        )


def _release_experts(model: torch.nn.Module) -> None:
    """Let the update prepare the weights of experts in the same way as the first load.

    On the CPU the kernel pads and packs the weights when it is created, and vLLM does not create it again in
    an update. The experts would stay those of the old policy. Kernels for GPUs read the unquantized weights
    of the layer in each call, and captured graphs need the kernel that they were captured with.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for experts in _experts(model):
            experts.quant_method.moe_kernel = None  # type: ignore[union-attr]


def _require_experts(model: torch.nn.Module) -> None:
    """Raise ModelError if no weights of the experts of a layer arrived in this update.

    vLLM's loaders of some models (gpt-oss) write into the parameters of experts directly. During an update
    these have no memory, and the weights are lost. vLLM only logs a warning.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for experts in _experts(model):
        info = get_layerwise_info(experts)
        # vLLM resets a layer once it has all its weights; then `can_load` is false.
        if info.can_load() and info.load_numel <= 0:
            raise ModelError(
                f"model.path: vLLM does not load the experts of {type(model).__name__} in a weight sync; use"
                " another model (docs/architectures.md has a table)"
            )


def _experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that hold the experts of a layer, if these are not quantized."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            yield module


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the embedding matrices again after an update.

    On the CPU vLLM multiplies with a packed copy. A head that is tied to the input embedding gets no tensor
    of its own, so the reload updates the shared matrix but not the packed copy, and logits would be those of
    the old policy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


class _Inbox:
    """Replaces the model during an update. It computes the checksum of each tensor, and then loads it into
    the model, or stores it if it belongs to an adapter (`is_adapter`).
    """

    def __init__(self, model: torch.nn.Module, *, is_adapter: bool) -> None:
        self._model = model
        self.is_adapter = is_adapter
        self.checksums: dict[str, str] = {}
        self.adapter: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        def hashed() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if failpoint("weight_sync.load", "drop") == "drop":
                    continue
                self.checksums[name] = tensor_checksum(tensor)
                yield name, tensor

        if self.is_adapter:
            # In host memory, for `load_adapter`. Over NCCL the tensors are views, and each would keep its
            # whole bucket.
            self.adapter.update((name, tensor.to("cpu", copy=True)) for name, tensor in hashed())
            return None
        return self._model.load_weights(hashed())  # type: ignore[operator]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _checksummed(base: Any) -> Any:
    """Return vLLM's backend `base` with an inbox."""

    class Checksummed(base):  # type: ignore[misc]
        model: Any

        def start_weight_update(self) -> None:
            self.inbox = _Inbox(self.model, is_adapter=self.vllm_config.lora_config is not None)
            if not self.inbox.is_adapter:
                super().start_weight_update()

        def receive_weights(self, update_info: Any) -> None:
            # vLLM's backends pass what arrives to `self.model.load_weights`.
            model = self.model
            self.model = self.inbox
            try:
                super().receive_weights(update_info)
            finally:
                self.model = model

        def finish_weight_update(self) -> None:
            if not self.inbox.is_adapter:
                _require_experts(self.model)
                super().finish_weight_update()

    Checksummed.__name__ = f"Checksummed{base.__name__}"
    return Checksummed


def _ipc_receiver(base: Any) -> Any:
    """Return vLLM's backend `ipc` with an inbox."""

    class IPCReceiver(_checksummed(base)):  # type: ignore[misc]
        _packed_importer: Any

        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            """Read the handles of the sender."""
            handles = typed_handles(update_dict["ipc_handles"])
            return super().parse_update_info({**update_dict, "ipc_handles": handles})

        def finish_weight_update(self) -> None:
            super().finish_weight_update()
            # vLLM does so after an update of the model. Until then the trainer cannot free its buffer.
            self._packed_importer.close()

    return IPCReceiver


class SyncExtension:
    """Mixed into vLLM's worker class; called by name through `collective_rpc`."""

    weight_transfer_engine: Any
    add_lora: Any

    def received_checksums(self) -> dict[str, str]:
        """Return the checksums of the last update by tensor name."""
        return dict(self.weight_transfer_engine.inbox.checksums)

    def load_adapter(self, number: int, config: dict[str, Any]) -> None:
        """Load the adapter of the last update under `number`. `config` is PEFT's.

        vLLM loads adapters from files only, so temporary files are written.
        """
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        inbox = self.weight_transfer_engine.inbox
        with tempfile.TemporaryDirectory(prefix="adapter-") as folder:
            save_file(inbox.adapter, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
            self.add_lora(LoRARequest(f"policy-{number}", number, folder))
        # vLLM has its own copies by now. These would stay in host memory until the next sync.
        inbox.adapter = {}


def _register() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    WeightTransferEngineFactory.register_engine("rlhf_gloo", GlooReceiver)
    WeightTransferEngineFactory.register_engine("rlhf_files", FilesReceiver)
    WeightTransferEngineFactory.register_engine("rlhf_nccl", _checksummed(NCCLWeightTransferEngine))
    WeightTransferEngineFactory.register_engine("rlhf_ipc", _ipc_receiver(IPCWeightTransferEngine))


_register()
