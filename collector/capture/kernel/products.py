"""The products of a model with its weights, as its kernels compute them: rounded and recorded.

A product is that of the module that owns its weight; if modules share one, of the innermost that runs. Nothing is kept
of a call that is neither rounded nor recorded, and its backward pass is torch's own.

    forward pass    the call begins, and is kept by the sequence number of the node that autograd makes of it
    backward pass   a kernel that a node calls belongs to the call of this number: dgrad multiplies by the weight, wgrad
                    by the x of the call
    recomputation   a forward pass within a backward pass: its modules run in that, or autograd is on
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from binade.collector.capture.adapters.attention import attend
from binade.collector.capture.adapters.dtensor import core_on_parts, is_dtensor
from binade.collector.capture.adapters.layer import Detach, InstrumentError, Layer, distinct
from binade.collector.capture.adapters.products import applying_function, computing, in_kernel, tensors_in, transformed
from binade.collector.capture.adapters.torch_modules import NOT_PRODUCTS, own_layers, own_shapes
from binade.collector.capture.adapters.towers import placed
from binade.collector.capture.adapters.weights import OwnProducts, is_linear
from binade.collector.capture.clock import backward_pass, repeated_frame
from binade.collector.capture.kernel.gemms import KeptProduct, PartialCall, backward, forward
from binade.collector.capture.kernel.operands import BatchAxis, KernelOperands, Orientation, ProductShape
from binade.collector.capture.kernel.overrides import VECTOR, Compute, watch
from binade.collector.capture.kernel.unseen import Unseen, in_function, in_transform
from binade.collector.capture.kernel.weights import MatchedWeight, ModelWeights
from binade.collector.capture.survey import ModuleHook, Survey
from binade.collector.models.attention import CoreBegin
from binade.collector.models.parallel import STACKED, Begin, Call
from binade.data.run.tensor_kinds import Gemm
from binade.quant.gemm import Observed, Tap
from binade.quant.memory import is_ordinary

# torch's nodes of these kernels, which compute nothing again.
OWN_NODES = frozenset(f"{name}Backward0" for name in ("Mm", "Addmm", "Bmm", "Baddbmm", "GroupedMm"))
BATCHED_NODES = frozenset(("BmmBackward0", "BaddbmmBackward0"))
KEPT = 1 << 16  # calls whose backward pass may come


@dataclass(frozen=True)
class RunningModule:
    """A module that runs, what it got, and the backward pass in which it does; -1 outside of one.

    plain     whether its products are left as they are, because a transform of torch.func runs it
    results   taps of products that wait for the module's result, because a bias is added to theirs
    """

    module: nn.Module
    given: object
    task: int
    plain: bool = False
    results: list[Tap] = field(default_factory=list)


class _RunningModules(threading.local):
    """The modules that run on this thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[RunningModule] = []


class Products:
    """Sees the products of one model: those with weights of layers, and the attention of cores."""

    def __init__(self, model: nn.Module, rounds_attention: bool, unseen: Unseen) -> None:
        self.model, self.rounds_attention, self.unseen = model, rounds_attention, unseen
        self.begins: dict[tuple[nn.Module, str], dict[int, Begin]] = {}
        self.cores: dict[nn.Module, CoreBegin] = {}
        self.running, self.kept = _RunningModules(), dict[int, list[KeptProduct]]()
        self.count, self.stepped = 0, False
        self.forgotten: set[int] | None = set()  # sequence numbers; None once that was said
        self.weights = ModelWeights(nn.Module())
        self.undo = ExitStack()

    def attach(self, layer: Layer, begin: Any) -> Detach:
        """Make the products of a layer run as the calls that are begun say, until the function returned is called."""
        if not (self.begins or self.cores):
            self._enter()
        name, _, expert = layer.part.rpartition(".") if layer.site.expert is not None else (layer.part, "", "")
        key = layer.module, name or layer.part or "weight"
        if layer.is_core:
            self.cores[layer.module] = begin
        else:
            self.begins.setdefault(key, {})[int(expert or 0)] = begin
            self.unseen.expect(key)

        def detach() -> None:
            if layer.is_core:
                del self.cores[layer.module]
            else:
                del self.begins[key][int(expert or 0)]
                if not self.begins[key]:
                    del self.begins[key]
            if not (self.begins or self.cores):
                self.undo.close()

        return detach

    def _enter(self) -> None:
        self.weights = ModelWeights(self.model)
        hook = ModuleHook(self._begins, sees_products=True)
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                before = module.register_forward_pre_hook(hook, with_kwargs=True)
                after = module.register_forward_hook(ModuleHook(self._ends), always_call=True)
                self.undo.callback(before.remove)
                self.undo.callback(after.remove)
        self.undo.callback(register_optimizer_step_post_hook(self._steps).remove)
        self.undo.callback(self.kept.clear)
        self.undo.callback(watch(self))

    def _steps(self, *_: Any) -> None:
        self.stepped = True

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frames, task = self.running.frames, backward_pass()
        if self.stepped and not frames and task == -1:
            self.stepped, self.count = False, 0
            self.forgotten = None if self.forgotten is None else set(self.kept)
            self.kept.clear()
        self.weights.hold(module)
        if plain := transformed():
            self._refuse_transform(module)
        else:
            self.unseen.begins(module)
        frames.append(RunningModule(module, (args, kwargs), task, plain))

    def _refuse_transform(self, module: nn.Module) -> None:
        """Raises InstrumentError for products of a module that would be rounded, and warns if they are not recorded."""
        core = self.cores.get(module)
        begins = [
            begin for (owner, _), of_weight in self.begins.items() if owner is module for begin in of_weight.values()
        ]
        for begin in (*begins, *((core.qk, core.pv) if core else ())):
            begin()

    def _ends(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        frames = self.running.frames
        while frames:
            frame = frames.pop()
            if frame.module is module:
                for tap in frame.results:
                    y: Any = next(tensors_in((result,)), None)
                    with computing:
                        tap(Observed("y", y.detach()))
                break
        if not frames and (result is not None or not sys.exc_info()[0]):
            self.unseen.ends()

    def attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """F.scaled_dot_product_attention in a core, as its two calls say; None where they are plain, or elsewhere."""
        frames = self.running.frames
        if (frames and frames[-1].plain) or not (is_ordinary(args[0]) or is_dtensor(args[0])):
            return None  # a tensor of torch.compile, which computes nothing, is not ordinary
        core = next((self.cores[frame.module] for frame in reversed(frames) if frame.module in self.cores), None)
        if core is None:
            if frames and self.rounds_attention and not any(x.is_nested for x in args[:3]):
                name = next(name for name, module in self.model.named_modules() if module is frames[-1].module)
                raise InstrumentError(
                    f"{name or 'the model'} attends, and is not known as an attention core: name it, cores=[{name!r}]"
                )
            return None
        qk, pv = core.qk(), core.pv()
        if qk.is_plain and pv.is_plain:
            return None

        def on_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(qk, pv, query, key, value, *args[3:], **kwargs)

        with computing:
            return core_on_parts("", on_parts, *args[:3])

    def product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Compute) -> Tensor | None:
        node = torch._C._current_autograd_node()
        if node is None or self._is_forward(node):
            # What no module computes is of the training loop, or measures.
            return self._forward(name, args, kwargs, compute) if node or self.running.frames else None
        number, batched = node._sequence_nr(), node.name() in BATCHED_NODES
        kept = self.kept.get(number)
        if kept is None:
            if self.forgotten and number in self.forgotten:
                self._warn_of_forgotten()
            return None
        given = KernelOperands.of(name, args, kwargs)
        known = ((each, each.shape.backward(given, self.weights)) for each in kept)
        alike = ((each, each.shape.backward_alike(given, batched)) for each in reversed(kept))
        for each, orientation in chain(known, alike):
            if orientation is not None:
                for part in each.parts:
                    part.call.rounding.check_differentiable()
                with computing, torch.no_grad():
                    return backward(each, orientation, given, compute)
        self.unseen.backward(kept[0].shape.weight, name, given.left, given.right)
        return None

    def _warn_of_forgotten(self) -> None:
        self.forgotten = None
        warnings.warn(
            "a backward pass came after the forward pass that followed an optimizer's step, or after "
            f"{KEPT:,} calls: its products are neither rounded nor recorded with products='kernel'",
            stacklevel=2,
        )

    def _is_forward(self, node: Any) -> bool:
        """Whether a kernel that this node of autograd calls belongs to a forward pass that is computed again."""
        frames = self.running.frames
        if frames and frames[-1].task == backward_pass():
            return True
        return torch.is_grad_enabled() and (node.name() not in OWN_NODES or repeated_frame() is not None)

    def _forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Compute) -> Tensor | None:
        frame = self.running.frames[-1] if self.running.frames else None
        if frame and frame.plain:
            return None
        if name == VECTOR:
            if frame and (of_vector := self.weights.of(args[0])):
                self.unseen.product(frame.module, name, args[0], args[1], of_vector)
            return None
        given = KernelOperands.of(name, args, kwargs)
        found = self._weight(given)
        if found is None:
            if frame and not in_transform():
                known = self.weights.of(given.right) or self.weights.of(given.left)
                self.unseen.product(frame.module, name, given.left, given.right, known)
            return None
        second_left, match, begins = found
        self.unseen.seen(match.held.owners if match else [(frame.module, "weight")] if frame else [])
        if in_transform():
            with in_kernel:
                for begin in begins.values():
                    begin()
            return None
        batch, first = _batch(given, second_left, match)
        parts = _begun(given, second_left, batch, begins, first)
        if all(part.call.is_plain for part in parts):
            return None
        shape = ProductShape.of(given, second_left, match)
        if any(part.call.tap for part in parts) and not (match and match.held.is_stack):
            x, _ = Orientation(Gemm.FORWARD, second_left).canonical(given)
            lead = _leading_axes(x, frame)
            parts = tuple(replace(part, call=replace(part.call, tap=_shaped(part.call, lead))) for part in parts)
        of_weight, of_x = (given.left, given.right) if second_left else (given.right, given.left)
        trains = match is not None and match.held.trains
        with_dgrad = of_x.requires_grad or (trains and any(x.requires_grad for x in tensors_in(frame and frame.given)))
        self._keep(KeptProduct(shape, batch, parts, with_dgrad), with_dgrad or of_weight.requires_grad or trains)
        late = frame.results if frame and _adds_bias_later(frame.module, given, match) else None
        with computing, torch.no_grad():
            return forward(given, second_left, batch, parts, compute, late)

    def _weight(self, given: KernelOperands) -> tuple[bool, MatchedWeight | None, dict[int, Begin]] | None:
        """(whether the weight is on the left, the weight, what begins the calls of its layers)."""
        for operand, is_left in ((given.right, False), (given.left, True)):
            if match := self.weights.of(operand):
                begins = self._begins_of(match)
                if begins:
                    return is_left, match, begins
        frame = self.running.frames[-1] if self.running.frames else None
        if frame is None or (frame.module, "weight") not in self.begins or not is_linear(frame.module):
            return None
        module: Any = frame.module
        shape, held = (module.out_features, module.in_features), vars(module)["_parameters"].get("weight")
        if tuple(given.right.mT.shape) != shape:
            return None
        if held is not None and held.is_floating_point() and tuple(held.shape) == shape and in_function():
            return None  # what a function makes of a weight, as those do that round by themselves
        return False, None, self.begins[frame.module, "weight"]

    def _begins_of(self, match: MatchedWeight) -> dict[int, Begin] | None:
        owners = dict(match.held.owners)
        for frame in reversed(self.running.frames):
            if frame.module in owners:
                return self.begins.get((frame.module, owners[frame.module]))
        return next((self.begins[owner] for owner in match.held.owners if owner in self.begins), None)

    def _keep(self, kept: KeptProduct, needs_gradient: bool) -> None:
        if not (needs_gradient and (torch.is_grad_enabled() or applying_function())):
            return
        if self.count >= KEPT:
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            if self.forgotten is not None and len(self.forgotten) < KEPT:
                self.forgotten.add(oldest)
        self.kept.setdefault(_sequence_number() - 1, []).append(kept)
        self.count += 1


def _sequence_number() -> int:
    """That of the node that autograd makes next on this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _batch(given: KernelOperands, second_left: bool, match: MatchedWeight | None) -> tuple[BatchAxis, int]:
    """What the axis of a batch is, and the number of the first expert."""
    weight = given.left if second_left else given.right
    first = match.expert if match else 0
    if weight.dim() == 2:
        return BatchAxis.NONE, first
    if given.ends is not None:
        return BatchAxis.TOKENS, first
    if len(weight) == 1 or weight.stride(0) == 0 or (match and match.expanded and not match.held.is_stack):
        return BatchAxis.REPEATED, first
    return (BatchAxis.EXPERTS if match and match.held.is_stack else BatchAxis.GROUPS), first


def _begun(
    given: KernelOperands, second_left: bool, batch: BatchAxis, begins: dict[int, Begin], first: int
) -> tuple[PartialCall, ...]:
    """The calls of a product, begun: one, or one for each expert that tokens were routed to."""

    def begun(expert: int) -> Call:
        call = begins[expert]()
        return replace(call, rounding=call.rounding.begun())

    if batch is BatchAxis.TOKENS and given.ends is not None:
        ends = given.ends.tolist()
        tokens = [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
        return tuple(PartialCall(begun(first + i), i, at) for i, at in enumerate(tokens) if at.start < at.stop)
    if batch is BatchAxis.EXPERTS:
        rows = given.right.shape[-1] if second_left else given.left.shape[-2]
        return tuple(PartialCall(begun(first + i), i) for i in range(len(given.left)) if rows)
    return (PartialCall(begun(first)),)


def _adds_bias_later(module: Any, given: KernelOperands, match: MatchedWeight | None) -> bool:
    """Whether torch's linear layer adds its bias to the result of this kernel."""
    if given.added is not None or not isinstance(module, nn.Linear) or module.bias is None:
        return False
    return match is None or any(owner is module for owner, _ in match.held.owners)


def _leading_axes(x: Tensor, frame: RunningModule | None) -> tuple[int, ...] | None:
    """The axes in front of the last that the tensor x [..., m, k] has in the model; None for one alone."""
    candidates: list[Any] = [*(tensors_in(frame.given) if frame else ()), *((x._base,) if x._base is not None else ())]
    for whole in candidates:
        local = whole._local_tensor if is_dtensor(whole) else whole
        if local.is_nested or not local.dim():
            continue
        more = local.dim() > x.dim() or local.dim() == 1 or (x.dim() > 2 and len(x) == 1)
        if more and local.numel() == x.numel() and local.shape[-1] == x.shape[-1]:
            return tuple(local.shape[:-1])
    return tuple(x.shape[:-1]) if x.dim() > 2 else None


def _shaped(call: Call, lead: tuple[int, ...] | None) -> Tap | None:
    """A tap that sees tokens with the axes that they have in the model."""
    tap = call.tap
    if tap is None or lead is None:
        return tap

    def show(seen: Observed) -> None:
        if seen.name in STACKED:
            shape = (*lead, seen.tensor.shape[-1])
            apart = seen.name not in ("wgrad_grad", "wgrad_a") and not call.quantizes
            seen = replace(seen, tensor=seen.tensor.reshape(shape)) if apart else replace(seen, shape=shape)
        tap(seen)

    return show


def seen_in_kernels(model: nn.Module, rounds_attention: bool, show: Callable[[str], None], survey: Survey) -> Survey:
    """The survey, with layers whose products are seen in kernels where that is possible: not those that are only
    watched, the models of this package, and attention that is written out. The first pass is not watched: show is
    called with a sentence about what is not seen.
    """
    if not survey.watched:
        return survey
    others = (module for module in model.modules() if isinstance(module, NOT_PRODUCTS))
    whole = (layer.module for layer in survey.layers if layer.kernels)
    products = Products(model, rounds_attention, Unseen(model, (*survey.left, *survey.unseen, *others, *whole), show))
    found = [*survey.layers, *placed(dict(model.named_modules()), [*_unnamed(model, survey)])]
    layers = tuple(
        replace(layer, attach=partial(products.attach, layer), exchanges=False, others=())
        if (layer.by_sdpa if layer.is_core else not (layer.kernels or layer.is_declared))
        else layer
        for layer in distinct(found)
    )
    return replace(survey, layers=layers, watched=False)


def _unnamed(model: nn.Module, survey: Survey) -> Iterator[Layer]:
    """The weights that no code of their module names in a product: of autograd functions, and of other modules."""
    modules = dict(model.named_modules())
    shapes = own_shapes(modules.values())
    known = {(layer.module, layer.part) for layer in survey.layers if not (layer.is_core or layer.is_declared)}
    whole = {layer.module for layer in survey.layers if layer.kernels}
    for name, module in modules.items():
        if isinstance(module, NOT_PRODUCTS) or module in survey.left or module in whole:
            continue
        owner = OwnProducts(name, module)
        for layer in own_layers(modules, shapes, name, owner, every=True):
            if (module, layer.part) not in known:
                yield layer
