"""Records what a step computes besides its products, if a Recorder names it: see data.tensor_kinds.Other.

Norms, LM heads and mixtures of experts are seen in their forward pass, parameters in the step of a torch optimizer that
holds them. Nothing is attached for tensors that are not named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from binade.collector.capture.adapters.engine import place
from binade.collector.capture.adapters.layer import Detach, Layer, distinct, is_a, set_on, whole
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.clock import running_backward
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.survey import EXCLUDED, Found
from binade.collector.models.norm import Point
from binade.collector.models.parallel import linear_shard
from binade.collector.models.site import HEAD, Site
from binade.data.segment import Shard
from binade.data.tensor_kinds import TENSOR_KINDS, Other, TensorKind
from binade.quant.gemm import sampling

NORM = re.compile(r"(Layer|RMS)Norm$")  # ends the names of their classes
# For a norm in a sequence-parallel region, whose gain has Megatron's mark: each rank has a part of the tokens.
SHARDS = {"a": "rows", "grad_b": "partial"}


def others(model: nn.Module, found: Found, names: Collection[str]) -> list[tuple[Other, Layer]]:
    """The norms, heads, experts and parameters of a model that have these tensors, as layers: a parameter's has its
    name. Parameters of FSDP and DTensors are left out."""
    places = {kind.product for kind in TENSOR_KINDS if kind.name in names and isinstance(kind.product, Other)}
    if not places:
        return []
    modules = dict(model.named_modules())
    heads = [layer for layer in (*found.heads, *found.layers) if layer.is_head]
    listed: list[tuple[Other, Layer]] = [(Other.HEAD, replace(layer, site=HEAD)) for layer in heads]
    for name, module in modules.items():
        if found.left.get(module) == EXCLUDED:
            continue
        if isinstance(module, Point):
            listed.append((module.product, Layer(name, module, module.site, whole, _nothing)))
        elif NORM.search(type(module).__name__):
            listed.append((Other.NORM, Layer(name, module, *_named(modules, name))))
    listed += [(Other.PARAMETER, layer) for layer in _parameters(model, modules, found)]
    unique = {each: distinct([layer for product, layer in listed if product is each]) for each in Other}
    return [(each, layer) for each, layers in unique.items() if each in places for layer in layers]


def _nothing(_: Any) -> Detach:
    return lambda: None


def _named(modules: dict[str, nn.Module], name: str) -> tuple[Site, Callable[[str], Shard], Any, str]:
    """The other fields of a Layer: site, shard, attach and path."""
    where, path = place(modules, name)
    return where, whole, _nothing, path


def parameter_sites(model: nn.Module, found: Found) -> dict[str, Site]:
    """Where the parameters of a model are, by name; without those that are not recorded."""
    layers = _parameters(model, dict(model.named_modules()), found)
    return {layer.name: layer.site for layer in distinct(list(layers))}


def _parameters(model: nn.Module, modules: dict[str, nn.Module], found: Found) -> Iterator[Layer]:
    if any(is_a("torch.distributed.fsdp", "FullyShardedDataParallel", module) for module in modules.values()):
        return
    linear = {layer.name: layer for layer in found.layers if not (layer.is_core or layer.part)}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if type(parameter) is not nn.Parameter or found.left.get(modules[owner]) == EXCLUDED:
            continue
        layer = linear.get(owner) or Layer(owner, modules[owner], *_named(modules, owner))
        module = layer.site.module if last == "weight" else f"{layer.site.module}.{last}"
        shard = partial(_shard_of, layer, last)
        yield replace(layer, name=name, site=replace(layer.site, module=module), shard=shard)


def _shard_of(layer: Layer, parameter: str, _: str) -> Shard:
    """The shard of a layer's weight, or of another of its parameters, which has the first axis of the weight alone."""
    shard = layer.shard("b")
    return shard if parameter == "weight" or shard.axis != -1 else replace(shard, kind="whole", axis=None)


@contextmanager
def recording(model: nn.Module, recorder: Recorder, found: Sequence[tuple[Other, Layer]]) -> Iterator[None]:
    """A context in which the layers found by `others` are recorded."""
    with ExitStack() as undo:
        for product, layer in found:
            if product is not Other.PARAMETER:
                method = _norm if product is Other.NORM else _result
                undo.callback(set_on(layer.module, "forward", method(recorder, layer, _kinds(product))))
        if parameters := {layer.name: layer for product, layer in found if product is Other.PARAMETER}:
            undo.enter_context(_optimizer(model, recorder, parameters, _kinds(Other.PARAMETER)))
        yield


def _kinds(product: Other) -> dict[str, TensorKind]:
    return {kind.observed: kind for kind in TENSOR_KINDS if kind.product is product}


def _result(recorder: Recorder, layer: Layer, kinds: dict[str, TensorKind]) -> Callable[..., Any]:
    """The module's forward, whose result is recorded."""
    forward: Callable[..., Any] = layer.module.forward
    (kind,) = kinds.values()

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if not (recorder.policy.idle or running_backward()):
            recorder.show(kind, layer, next(tensors_in((result,))), recorder.policy.begin())
        return result

    return watched


def _norm(recorder: Recorder, layer: Layer, kinds: dict[str, TensorKind]) -> Callable[..., Any]:
    """A norm's forward, whose input, gain and, once it arrives, gradient of the gain are recorded."""
    forward: Callable[..., Any] = layer.module.forward

    def shard(name: str) -> Shard:
        split = getattr(getattr(layer.module, "weight", None), "sequence_parallel", False)
        return linear_shard(SHARDS if split else {}, name, recorder.ranks.tensor, 1)

    layer = replace(layer, shard=shard)

    def watched(*args: Any, **kwargs: Any) -> Any:
        moment = None if recorder.policy.idle else recorder.policy.begin()
        if moment is None or not moment.recording:
            return forward(*args, **kwargs)
        gain: Tensor | None = getattr(layer.module, "weight", None)
        if not running_backward():
            recorder.show(kinds["a"], layer, next(tensors_in((args, kwargs))), moment)
            if gain is not None:
                recorder.show(kinds["b"], layer, gain, moment)
        result = forward(*args, **kwargs)
        y = next(tensors_in((result,)))
        if gain is not None and gain.requires_grad and y.requires_grad and kinds["grad_b"].name in recorder.tensors:
            y.register_hook(  # type: ignore[no-untyped-call]
                lambda _: None if sampling() else _next_gradient(gain, show_gradient)
            )

        def show_gradient(gradient: Tensor) -> None:
            recorder.show(kinds["grad_b"], layer, gradient, moment)

        return result

    return watched


def _next_gradient(x: Tensor, show: Callable[[Tensor], None]) -> None:
    """Call `show` with the next gradient that reaches x, which is this pass's share: called within a backward pass."""

    def arrived(gradient: Tensor) -> None:
        handle.remove()
        show(gradient)

    handle = x.register_hook(arrived)  # type: ignore[no-untyped-call]


@contextmanager
def _optimizer(
    model: nn.Module, recorder: Recorder, layers: dict[str, Layer], kinds: dict[str, TensorKind]
) -> Iterator[None]:
    """A context in which optimizer steps are recorded: their state, these parameters by name, and their updates."""
    compares = not recorder.tensors.isdisjoint((kinds["update"].name, kinds["ratio"].name))
    before: dict[Tensor, Tensor] = {}

    def held(optimizer: Optimizer) -> Iterator[tuple[Tensor, Layer]]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if type(parameter) is nn.Parameter and (layer := layers.get(names.get(parameter, ""))):
                yield parameter, layer

    def begins(optimizer: Optimizer, *_: Any) -> None:
        before.clear()
        if compares and recorder.policy.moment_of_step().recording:
            before.update((parameter, parameter.detach().clone()) for parameter, _ in held(optimizer))

    def ended(optimizer: Optimizer, *_: Any) -> None:
        moment = recorder.policy.moment_of_step()
        if not moment.recording:
            return
        for parameter, layer in held(optimizer):
            state = optimizer.state.get(parameter, {})
            shown = {"weight": parameter.detach()} | {name: state.get(name) for name in ("exp_avg", "exp_avg_sq")}
            if (old := before.pop(parameter, None)) is not None:
                shown["update"] = parameter.detach().float() - old.float()
                shown["ratio"] = _norms(shown["update"]) / _norms(old)
            for name, x in shown.items():
                if isinstance(x, Tensor) and x.numel():
                    recorder.show(kinds[name], layer, x, moment)
        recorder.publish_step()

    with ExitStack() as undo:
        undo.callback(register_optimizer_step_pre_hook(begins).remove)
        undo.callback(register_optimizer_step_post_hook(ended).remove)
        yield


def _norms(x: Tensor) -> Tensor:
    """The L2 norm along the last axis: [rows], float32; [1] of a vector or a scalar."""
    found: Tensor = torch.linalg.vector_norm(x.float().reshape(-1, x.shape[-1] if x.dim() else 1), dim=1)
    return found
