"""The models of collector.models: the adapter sets the attribute `begin` of their layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from binade.collector.capture.adapters.layer import Detach, InstrumentError, Layer
from binade.collector.models.attention import CoreAttention
from binade.collector.models.parallel import ParallelLinear


def find(model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        if isinstance(module, (ParallelLinear, CoreAttention)):
            yield _layer(name, module)


def _layer(name: str, module: ParallelLinear | CoreAttention) -> Layer:
    def attach(begin: Any) -> Detach:
        before, module.begin = module.begin, begin

        def detach() -> None:
            if module.begin is not begin:
                raise InstrumentError(
                    f"{name} was instrumented again in the meantime: exit the later `with` block first"
                )
            module.begin = before

        return detach

    return Layer(name, module, module.site, module.shard, attach, exchanges=True)
