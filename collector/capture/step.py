"""Records what a step computes besides its products, if a Recorder names it: see data.run.tensor_kinds.Other.

Norms, LM heads and mixtures of experts are seen in their forward pass, parameters in the step of a torch optimizer that
holds them. Nothing is attached for tensors that are not named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.engine import place
from binade.collector.capture.adapters.layer import Detach, Layer, distinct, is_a, set_on, whole
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.clock import Moment, parameters_of, running_backward
from binade.collector.capture.optimizer_updates import MOMENTUM, orthogonalized
from binade.collector.capture.survey import EXCLUDED, Survey
from binade.collector.models.norm import RecordingPoint
from binade.collector.models.parallel import linear_shard
from binade.collector.models.site import HEAD, Site
from binade.collector.probes.probe import Recording
from binade.data.run.columns import Shard
from binade.data.run.tensor_kinds import TENSOR_KINDS, Other, TensorKind

NORM = re.compile(r"(Layer|RMS)Norm(1P)?$")  # ends the names of their classes
SAMPLED_ROWS = 8
# For a norm in a sequence-parallel region, whose gain has Megatron's mark: each rank has a part of the tokens.
SHARDS = {"a": "rows", "y": "rows", "grad": "rows", "grad_b": "partial"}


def others(model: nn.Module, survey: Survey, names: Collection[str]) -> list[tuple[Other, Layer]]:
    """The norms, heads, experts and parameters of a model that have these tensors, as layers: a parameter's has its
    name, and Newton–Schulz has those of the parameters. Parameters of FSDP and DTensors are left out."""
    places = {kind.product for kind in TENSOR_KINDS if kind.name in names and isinstance(kind.product, Other)}
    places |= {Other.PARAMETER} if Other.NEWTON_SCHULZ in places else set()
    if not places:
        return []
    modules = dict(model.named_modules())
    heads = [layer for layer in (*survey.heads, *survey.layers) if layer.is_head]
    listed: list[tuple[Other, Layer]] = [(Other.HEAD, replace(layer, site=HEAD)) for layer in heads]
    for name, module in modules.items():
        if survey.left.get(module) == EXCLUDED:
            continue
        if isinstance(module, RecordingPoint):
            listed.append((module.product, Layer(name, module, module.site, whole, _nothing)))
        elif NORM.search(type(module).__name__):
            listed.append((Other.NORM, Layer(name, module, *_named(modules, name))))
    listed += [(Other.PARAMETER, layer) for layer in _parameters(model, modules, survey)]
    unique = {part: distinct([layer for product, layer in listed if product is part]) for part in Other}
    return [(part, layer) for part, layers in unique.items() if part in places for layer in layers]


def _nothing(_: Any) -> Detach:
    return lambda: None


def _named(modules: dict[str, nn.Module], name: str) -> tuple[Site, Callable[[str], Shard], Any, str]:
    """The other fields of a Layer: site, shard, attach and path."""
    where, path = place(modules, name)
    return where, whole, _nothing, path


def parameter_sites(model: nn.Module, survey: Survey) -> dict[str, Site]:
    """Where the parameters of a model are, by name; without those that are not recorded."""
    layers = _parameters(model, dict(model.named_modules()), survey)
    return {layer.name: layer.site for layer in distinct(list(layers))}


def _parameters(model: nn.Module, modules: dict[str, nn.Module], survey: Survey) -> Iterator[Layer]:
    if any(is_a("torch.distributed.fsdp", "FullyShardedDataParallel", module) for module in modules.values()):
        return
    linear = {layer.name: layer for layer in survey.layers if not (layer.is_core or layer.part)}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if type(parameter) is not nn.Parameter or survey.left.get(modules[owner]) == EXCLUDED:
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
def recorded(model: nn.Module, recording: Recording, layers: Sequence[tuple[Other, Layer]]) -> Iterator[None]:
    """A context in which the layers found by `others` are recorded."""
    parameters = {layer.name: layer for product, layer in layers if product is Other.PARAMETER}
    with ExitStack() as undo:
        for product, layer in layers:
            if product is not Other.PARAMETER:
                shown = (
                    replace(layer, shard=partial(_shard_of_norm, recording, layer)) if product is Other.NORM else layer
                )
                undo.callback(set_on(layer.module, "forward", _forward(recording, shown, _kinds(recording, product))))
        if parameters:
            undo.enter_context(_optimizer(model, recording, parameters))
        yield


def _kinds(recording: Recording, product: Other) -> dict[str, TensorKind]:
    """The kinds that are named, by what is observed."""
    return {kind.observed: kind for kind in TENSOR_KINDS if kind.product is product and kind.name in recording.tensors}


def _shard_of_norm(recording: Recording, layer: Layer, name: str) -> Shard:
    split = getattr(layer.weight, "sequence_parallel", False)
    return linear_shard(SHARDS if split else {}, name, recording.ranks.tensor, 1)


def _forward(recording: Recording, layer: Layer, kinds: dict[str, TensorKind]) -> Callable[..., Any]:
    """The module's forward. Recorded are the first tensor among its arguments ("a"), its weight ("b"), of a norm the
    gain that multiplies, its result ("y") and, once they arrive, the gradients of the result ("grad") and the weight
    ("grad_b")."""
    forward: Callable[..., Any] = layer.module.forward
    is_norm = any(kind.product is Other.NORM for kind in kinds.values())
    zero_centered: bool | None = None

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal zero_centered
        moment = None if recording.policy.idle else recording.policy.begin()
        if moment is None or not moment.recording:
            return forward(*args, **kwargs)

        def show(name: str, x: Tensor | None) -> None:
            if name in kinds and x is not None:
                recording.show(kinds[name], layer, x, moment)

        shown = False

        def arrived(gradient: Tensor) -> None:
            nonlocal shown
            if not shown:  # another backward pass through this call is not recorded
                shown = True
                show("grad", gradient)
                if "grad_b" in kinds and weight is not None and weight.requires_grad:
                    _next_gradient(weight, partial(show, "grad_b"))

        weight: Tensor | None = layer.weight
        first_pass = not running_backward()
        sample = None
        if first_pass:
            x = next(tensors_in((args, kwargs)), None)
            show("a", x)
            if is_norm and "b" in kinds and x is not None and zero_centered is None:
                sample = rows_of(x, SAMPLED_ROWS).clone()  # some norms overwrite their input
            elif not is_norm:
                show("b", weight)
        result = forward(*args, **kwargs)
        y = next(tensors_in((result,)))
        if first_pass:
            if sample is not None and weight is not None:
                zero_centered = is_zero_centered(layer.module, weight, sample, y)
            if is_norm and weight is not None:
                show("b", 1 + weight.detach().float() if zero_centered else weight)
            show("y", y)
        if y.requires_grad and not kinds.keys().isdisjoint(("grad", "grad_b")):
            y.register_hook(arrived)  # type: ignore[no-untyped-call]
        return result

    return watched


def rows_of(x: Tensor, count: int) -> Tensor:
    """The first rows of x [..., columns], of a DTensor those of this rank."""
    held: Any = x
    local: Tensor = held.to_local() if is_dtensor(x) else x
    return local.detach().reshape(-1, local.shape[-1] if local.dim() else 1)[:count]


@torch.no_grad()
def is_zero_centered(module: nn.Module, weight: Tensor, x: Tensor, y: Tensor) -> bool | None:
    """Whether a norm multiplies by 1 + w and not by its weight w, as those of Gemma, Qwen3-Next and Megatron's
    layernorm_zero_centered_gamma do: by its result y [..., columns], whose first rows are those of x [rows, columns].
    None if these say neither. Waits for a GPU."""
    w = rows_of(weight, 1).double()[0]
    x, y = x.double(), rows_of(y, len(x)).double()
    if not (x.shape == y.shape and x.shape[-1:] == w.shape):
        return None
    bias = getattr(module, "bias", None)
    y = y - rows_of(bias, 1).double() if isinstance(bias, Tensor) and bias.shape == weight.shape else y
    eps = next((e for name in ("eps", "variance_epsilon") if isinstance(e := getattr(module, name, None), float)), 0.0)
    centered = x - x.mean(-1, keepdim=True)
    normed = [part * (part.square().mean(-1, keepdim=True) + eps).rsqrt() for part in (x, centered)]
    plain, shifted = (min(float((y - n * gain).norm()) for n in normed) for gain in (w, 1 + w))
    return shifted < plain if min(plain, shifted) < 0.1 * float(y.norm()) else None


def _next_gradient(x: Tensor, show: Callable[[Tensor], None]) -> None:
    """Call `show` with the next gradient that reaches x, which is this pass's share: called within a backward pass."""

    def arrived(gradient: Tensor) -> None:
        handle.remove()
        show(gradient)

    handle = x.register_hook(arrived)  # type: ignore[no-untyped-call]


@contextmanager
def _optimizer(model: nn.Module, recording: Recording, layers: dict[str, Layer]) -> Iterator[None]:
    """A context in which optimizer steps are recorded: these parameters by name, what CHANGES computes of them, their
    state in the optimizer by its own names, and the products of Newton–Schulz."""
    kinds, of_products = _kinds(recording, Other.PARAMETER), _kinds(recording, Other.NEWTON_SCHULZ)
    before: dict[Tensor, Tensor] = {}
    momenta: dict[Tensor, Tensor] = {}

    def held(optimizer: Optimizer) -> Iterator[tuple[Tensor, Layer]]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in parameters_of(optimizer):
            if type(parameter) is nn.Parameter and (layer := layers.get(names.get(parameter, ""))):
                yield parameter, layer

    def begins(optimizer: Optimizer, *_: Any) -> None:
        before.clear()
        momenta.clear()
        if not recording.policy.moment_of_step().recording:
            return
        if not CHANGES.keys().isdisjoint(kinds):
            before.update((parameter, parameter.detach().clone()) for parameter, _ in held(optimizer))
        if of_products and isinstance(optimizer, torch.optim.Muon):
            # After the step, the momentum may be rounded.
            states = ((parameter, optimizer.state.get(parameter, {})) for parameter, _ in held(optimizer))
            momenta.update((parameter, state[MOMENTUM].clone()) for parameter, state in states if MOMENTUM in state)

    @torch.no_grad()
    def orthogonalizes(optimizer: torch.optim.Muon, parameter: Tensor, layer: Layer, moment: Moment) -> None:
        """Compute the products of the step once more, and record their operands."""
        gradient, momentum = parameter.grad, momenta.pop(parameter, None)
        if gradient is None or layer.shard("b").kind != "whole":  # a rank's part is not the matrix of the layer
            return

        def see(number: int, operands: Mapping[str, Tensor]) -> None:
            site = replace(layer.site, module=f"{layer.site.module}.ns{number}")
            for name, kind in of_products.items():
                recording.show(kind, replace(layer, site=site, shard=whole), operands[name], moment)

        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        momentum = torch.zeros_like(gradient) if momentum is None else momentum
        orthogonalized(momentum.lerp(gradient, 1 - group["momentum"]), gradient, group, see)

    def ended(optimizer: Optimizer, *_: Any) -> None:
        moment = recording.policy.moment_of_step()
        if not moment.recording:
            return
        for parameter, layer in held(optimizer):
            if of_products and isinstance(optimizer, torch.optim.Muon):
                orthogonalizes(optimizer, parameter, layer, moment)
            state, old = optimizer.state.get(parameter, {}), before.pop(parameter, None)
            for name, kind in kinds.items():
                if name in CHANGES:
                    x = None if old is None else CHANGES[name](old, parameter.detach())
                else:
                    x = parameter if name == "weight" else state.get(name)
                if isinstance(x, Tensor) and x.numel():
                    recording.show(kind, layer, x, moment)
        recording.publish_step()

    with register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ended):
        yield


def _norms(x: Tensor) -> Tensor:
    """The L2 norm along the last axis: [rows], float32; [1] of a vector or a scalar."""
    norms: Tensor = torch.linalg.vector_norm(x.float().reshape(-1, x.shape[-1] if x.dim() else 1), dim=1)
    return norms


def _update(old: Tensor, new: Tensor) -> Tensor:
    return new.float() - old.float()


# Functions of a parameter before and after a step.
CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "update": _update,
    "ratio": lambda old, new: _norms(_update(old, new)) / _norms(old),
}
