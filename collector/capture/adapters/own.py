"""The models of collector.models: the adapter sets the attribute `quantization` of their layers."""

from __future__ import annotations

from torch import nn

from binade.collector.capture.adapters.layer import Detach, Found, InstrumentError, Layer, LayerQuantization
from binade.collector.models.attention import CoreAttention
from binade.collector.models.parallel import ParallelLinear


def find(model: nn.Module) -> Found:
    return Found(tuple(_layer(name, m) for name, m in model.named_modules() if _is_own(m)))


def _is_own(module: nn.Module) -> bool:
    return isinstance(module, (ParallelLinear, CoreAttention))


def _layer(name: str, module: ParallelLinear | CoreAttention) -> Layer:
    def attach(quantization: LayerQuantization) -> Detach:
        before, module.quantization = module.quantization, quantization

        def detach() -> None:
            if module.quantization is not quantization:
                raise InstrumentError(f"{name} was instrumented again meanwhile: leave the later block first")
            module.quantization = before

        return detach

    return Layer(name, module, module.site, module.shard, attach)
