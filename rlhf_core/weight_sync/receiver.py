"""The engines' side of weight sync: backends for vLLM's weight-transfer API that checksum every tensor that arrives.

vLLM imports this module in each of an engine's workers (`worker_extension_cls`), which registers the backends:
`rlhf_gloo` is ours; `rlhf_nccl` and `rlhf_ipc` are vLLM's own with the checksums added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlhf_core.weight_sync.buckets import TensorSpec, cut, unpack
from rlhf_core.weight_sync.checksum import tensor_checksum
from rlhf_core.weight_sync.gloo import GlooGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is untyped here
    """Where the sender waits. The receivers' ranks follow `rank_offset` in the order of engines and their workers."""

    address: str
    port: int
    rank_offset: int
    size: int
    bucket_bytes: int
    timeout: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vllm is untyped here
    """What comes, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]  # vllm is untyped here
    """Receives packed buckets and loads them layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = GlooGroup(init_info.address, init_info.port, rank, init_info.size, init_info.timeout)
        self._bucket_bytes = init_info.bucket_bytes

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.checksums: dict[str, str] = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends in torch.accelerator.synchronize(), which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        specs = [
            TensorSpec(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        ]
        for bucket in cut(specs, self._bucket_bytes):
            buffer = self._group.receive(sum(spec.bytes for spec in bucket))
            pairs = [(spec.name, tensor) for spec, tensor in zip(bucket, unpack(buffer, bucket), strict=True)]
            self.checksums.update((name, tensor_checksum(tensor)) for name, tensor in pairs)
            self.model.load_weights(pairs)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _repack_embeddings(self.model)

    def shutdown(self) -> None:
        self.__dict__.pop("_group", None)


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Pack embedding matrices again from the weights that now lie in them.

    On the CPU vLLM multiplies with a packed copy. A head tied to the input embedding receives no tensor of its own, so
    the reload updates the shared matrix but not the head's copy: logits would come from the old policy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


class _Hashing:
    """Stands in for the model while vLLM's own backend receives: checksums each tensor, then loads it."""

    def __init__(self, model: torch.nn.Module, checksums: dict[str, str]) -> None:
        self._model = model
        self._checksums = checksums

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        def hashed() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                self._checksums[name] = tensor_checksum(tensor)
                yield name, tensor

        return self._model.load_weights(hashed())  # type: ignore[operator]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _checksummed(base: Any) -> Any:
    """vLLM's backend `base` with `checksums` of what arrived."""

    class Checksummed(base):  # type: ignore[misc]
        model: Any

        def start_weight_update(self) -> None:
            self.checksums: dict[str, str] = {}
            super().start_weight_update()

        def receive_weights(self, update_info: Any) -> None:
            model = self.model
            self.model = _Hashing(model, self.checksums)
            try:
                super().receive_weights(update_info)
            finally:
                self.model = model

    Checksummed.__name__ = f"Checksummed{base.__name__}"
    return Checksummed


class SyncExtension:
    """Mixed into vLLM's worker class; called by name through `collective_rpc`."""

    weight_transfer_engine: Any

    def received_checksums(self) -> dict[str, str]:
        """Tensor name -> checksum of the last update."""
        return dict(self.weight_transfer_engine.checksums)


def _register() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    WeightTransferEngineFactory.register_engine("rlhf_gloo", GlooReceiver)
    WeightTransferEngineFactory.register_engine("rlhf_nccl", _checksummed(NCCLWeightTransferEngine))
    WeightTransferEngineFactory.register_engine("rlhf_ipc", _checksummed(IPCWeightTransferEngine))


_register()
