"""The products of a model with its weights, as its kernels compute them: rounded and recorded.

A product is that of the module that owns its weight; if modules share one, of the innermost that runs. Nothing is kept
of a call that is neither rounded nor recorded, and its backward pass is torch's own.

    forward pass    the call begins, and is kept by the sequence number of the node that autograd makes of it
    backward pass   a kernel that a node calls belongs to the call of this number: dgrad multiplies by the weight, wgrad
                    by the x of the call
    recomputation   a forward pass within a backward pass: its modules run in that, or autograd is on
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from binade.collector.capture.adapters.attend import attend
from binade.collector.capture.adapters.boundary import Boundary
from binade.collector.capture.adapters.dtensor import core_on_parts, is_dtensor
from binade.collector.capture.adapters.first_pass import calling_module
from binade.collector.capture.adapters.layer import (
    EAGER,
    FIRST_PASS,
    Detach,
    Layer,
    refusal,
    refuse,
    weight_of,
)
from binade.collector.capture.adapters.products import applying_function, computing, in_kernel, tensors_in, transformed
from binade.collector.capture.adapters.torch_modules import is_plain_linear
from binade.collector.capture.adapters.weights import is_linear
from binade.collector.capture.clock import backward_pass, repeated_frame
from binade.collector.capture.kernel.callers import in_function, in_transform
from binade.collector.capture.kernel.gemms import KeptProduct, PartialCall, backward, forward
from binade.collector.capture.kernel.operands import (
    OWN_NODES,
    AutogradNode,
    BatchAxis,
    KernelOperands,
    Orientation,
    ProductShape,
)
from binade.collector.capture.kernel.overrides import Compute, watch, whole
from binade.collector.capture.kernel.weights import MatchedWeight, ModelWeights, Owner, memory
from binade.collector.capture.survey import ModuleHook
from binade.collector.models.attention import CoreBegin
from binade.collector.models.parallel import STACKED, Begin, Call
from binade.data.run.tensor_kinds import Gemm
from binade.quant.gemm import Observed, Tap
from binade.quant.memory import is_ordinary

NOT_SEEN = "multiplies where products='kernel' does not see it, so it is recorded but not rounded"
KEPT = 1 << 16  # calls whose backward pass may come


@dataclass(frozen=True)
class RunningModule:
    """A module that runs, what it got, and the backward pass in which it does; -1 outside of one.

    plain     whether its products are left as they are, because a transform of torch.func runs it
    boundary  what watches a linear layer from outside, as long as no kernel has multiplied by its weight
    attends   whether it is a core that has not attended
    eager     whether functions that it calls, compiled or not, run eagerly until it ends
    results   taps of products that wait for the module's result, because a bias is added to theirs
    """

    module: nn.Module
    given: object
    task: int
    plain: bool = False
    boundary: Boundary | None = None
    attends: bool = False
    eager: bool = False
    results: list[Tap] = field(default_factory=list)


_threads = count()


class _RunningModules(threading.local):
    """The modules that run on this thread, the innermost last, and a number that no other thread has."""

    def __init__(self) -> None:
        self.frames: list[RunningModule] = []
        self.thread = next(_threads)


class Products:
    """Sees the products of one model: those with weights of layers, and the attention of cores."""

    def __init__(self, model: nn.Module, left: Collection[nn.Module], show: Callable[[str], None]) -> None:
        self.model, self.left, self.show = model, left, show
        self.names = {module: name for name, module in model.named_modules()}
        self.seen = 0  # products with weights of layers, in forward passes
        self.from_outside: set[nn.Module] = set()  # linear layers that may have kernels of their own
        self.begins: dict[tuple[nn.Module, str], dict[int, Begin]] = {}
        self.cores: dict[nn.Module, CoreBegin] = {}
        self.running, self.kept = _RunningModules(), dict[int, list[KeptProduct]]()
        self.count, self.stepped, self.warned_of_other = 0, False, False
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
            if key[1] == "weight" and is_linear(layer.module) and not is_plain_linear(layer.module):
                self.from_outside.add(layer.module)

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

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module is to be called with, if that is something else."""
        frames, task = self.running.frames, backward_pass()
        if self.stepped and not frames and task == -1:
            self.stepped, self.count = False, 0
            self.forgotten = None if self.forgotten is None else set(self.kept)
            self.kept.clear()
        self.weights.hold(module)
        if plain := transformed():
            self._refuse_transform(module)
        boundary = Boundary(args, kwargs) if module in self.from_outside and not plain else None
        attends, eager = module in self.cores and not plain, task != -1 and not frames
        if eager:  # computed again, when no forward of the model runs
            EAGER.__enter__()
        frames.append(RunningModule(module, (args, kwargs), task, plain, boundary, attends, eager))
        return (boundary.args, boundary.kwargs) if boundary else None

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
            if frame.eager:
                EAGER.__exit__()
            if frame.module is module:
                for tap in frame.results:
                    y: Any = next(tensors_in((result,)), None)
                    with computing:
                        tap(Observed("y", y.detach()))
                if result is not None:
                    self._not_seen(frame, result)
                break

    def _not_seen(self, frame: RunningModule, result: Any) -> None:
        """Record a linear layer from outside that multiplied in kernels of its own, and refuse a core that did not
        attend as it is seen."""
        if frame.boundary and (frame.module, "weight") in self.begins:
            call = self.begins[frame.module, "weight"][0]()
            if call.quantizes and FIRST_PASS.findings:
                FIRST_PASS.findings.unrounded.setdefault(self.names[frame.module], NOT_SEEN)
            if call.tap:
                frame.boundary.show(call.tap, weight_of(frame.module), result)
        if frame.attends and frame.module in self.cores:
            core = self.cores[frame.module]
            self._missing(frame.module, core.qk(), core.pv(), "did not call F.scaled_dot_product_attention")

    def _missing(self, module: nn.Module, qk: Call, pv: Call, what: str) -> None:
        """Refuses a core, or warns if its products are only recorded."""
        name = self.names[module]
        if qk.quantizes or pv.quantizes:
            refuse(name, module, what)
        elif not (qk.is_plain and pv.is_plain):
            warnings.warn(refusal({name: module}, {name: what}), stacklevel=2)

    def attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """F.scaled_dot_product_attention in a core, as its two calls say; None where they are plain, or elsewhere."""
        frames = self.running.frames
        if (frames and frames[-1].plain) or not (is_ordinary(args[0]) or is_dtensor(args[0])):
            return None  # a tensor of torch.compile, which computes nothing, is not ordinary
        at = next((at for at in reversed(range(len(frames))) if frames[at].module in self.cores), None)
        if at is None:
            return None
        frames[at] = replace(frames[at], attends=False)
        module = frames[at].module
        core = self.cores[module]
        qk, pv = core.qk(), core.pv()
        if qk.is_plain and pv.is_plain:
            return None
        if in_function():
            self._missing(module, qk, pv, "attends in the forward method of a torch.autograd.Function")
            return None

        def on_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(qk, pv, query, key, value, *args[3:], **kwargs)

        with computing:
            return core_on_parts("", on_parts, *args[:3])

    def product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Compute) -> Tensor | None:
        node = torch._C._current_autograd_node()
        if node is None or self._is_forward(node):
            return self._forward(name, args, kwargs, compute, node is not None)
        number = node._sequence_nr()
        kept = self.kept.get(number)
        if kept is None:
            if self.forgotten and number in self.forgotten:
                self._warn_of_forgotten()
            return None
        given = KernelOperands.of(name, args, kwargs)
        if found := self._backward(kept, given, AutogradNode.of(node.name())):
            each, orientation = found
            for part in each.parts:
                part.call.rounding.check_differentiable()
            with computing, torch.no_grad():
                return backward(each, orientation, given, compute)
        self._warn_of_other(kept[0].shape.weight, name, given)
        return None

    def _backward(
        self, kept: Sequence[KeptProduct], given: KernelOperands, node: AutogradNode
    ) -> tuple[KeptProduct, Orientation] | None:
        """The product whose GEMM this is, of those with one number. Each thread counts on its own; what is computed
        again is computed on the thread of its backward pass. In an autograd function several products may have one
        input: a wgrad is that of the product whose dgrad had the same gradient, else the one that was seen least."""
        if len(kept) > 1:
            kept = sorted(kept, key=lambda each: (each.thread != self.running.thread, -each.thread))
        known = [(each, found) for each in kept if (found := each.shape.backward(given, self.weights))]
        alike = ((each, found) for each in kept if (found := each.shape.backward_alike(given, node, each.gradient)))
        product, orientation = next(chain(known, alike), (None, None))
        if product is None or orientation is None:
            return None
        gradient = memory(given.right if orientation.second_left else given.left)
        if orientation.gemm is Gemm.DGRAD:
            product.gradient = gradient
        elif orientation.gemm is Gemm.WGRAD and known:
            of_input = [each for each, found in known if found.gemm is Gemm.WGRAD]
            product = min(of_input, key=lambda each: (each.gradient != gradient, each.wgrads))
            product.wgrads += 1
        return product, orientation

    def _warn_of_other(self, weight: MatchedWeight | None, name: str, given: KernelOperands) -> None:
        """Warns once of a product in the backward pass of this weight's product that is not a GEMM of it, as an
        autograd function may compute."""
        left, right = given.left, given.right
        if weight is None or self.warned_of_other or not left.is_floating_point() or left.shape[-1] < 2:
            return
        self.warned_of_other = True
        module, of_module = weight.held.owners[0]
        self.show(
            f"the backward pass of a product by {'.'.join(filter(None, (self.names.get(module, ''), of_module)))} "
            f"multiplies {list(left.shape)} by {list(right.shape)} ({name}), which is neither its dgrad nor its wgrad: "
            "such products are neither rounded nor recorded"
        )

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

    def _forward(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Compute, again: bool
    ) -> Tensor | None:
        frame = self.running.frames[-1] if self.running.frames else None
        if frame and (frame.plain or frame.module in self.left):
            return None
        given = KernelOperands.of(name, args, kwargs)
        found = self._weight(given)
        if found is None or not (frame or again or calling_module(self.names)):
            return None  # what no module computes is of the training loop, or measures
        second_left, match, begins = found
        self._sees(match.held.owners if match else [(frame.module, "weight")] if frame else [])
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
        trains = match is not None and match.held.needs_gradient
        below = trains and not of_weight.requires_grad  # autograd, whose tensors have other objects
        with_dgrad = of_x.requires_grad or (below and any(x.requires_grad for x in tensors_in(frame and frame.given)))
        kept = KeptProduct(shape, batch, parts, with_dgrad, self.running.thread)
        self._keep(kept, with_dgrad or of_weight.requires_grad or trains)
        late = frame.results if frame and _adds_bias_later(frame.module, given, match) else None
        with computing, torch.no_grad():
            return forward(given, second_left, batch, parts, compute, late)

    def _sees(self, owners: Sequence[Owner]) -> None:
        """A product with the weight of these."""
        self.seen += 1
        if not self.from_outside:
            return
        modules, frames = {module for module, _ in owners}, self.running.frames
        self.from_outside -= modules
        for at, running in enumerate(frames):
            if running.boundary and running.module in modules:
                frames[at] = replace(running, boundary=None)

    def _weight(self, given: KernelOperands) -> tuple[bool, MatchedWeight | None, dict[int, Begin]] | None:
        """(whether the weight is on the left, the weight, what begins the calls of its layers)."""
        for operand, is_left in ((given.right, False), (given.left, True)):
            if match := self.weights.of(operand):
                begins = self._begins_of(match)
                if begins:
                    return is_left, match, begins
        frame = self.running.frames[-1] if self.running.frames else None
        if frame is None:
            return None
        for operand, is_left in ((given.right, False), (given.left, True)):
            match = self.weights.copy_in(frame.module, operand)
            if match and (begins := self._begins_of(match)):
                return is_left, match, begins
        if (frame.module, "weight") not in self.begins or not is_linear(frame.module):
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
        innermost = self.running.frames[-1].module if self.running.frames else None
        if innermost is not None and weight_of(innermost) is None and (innermost, "weight") in self.begins:
            return self.begins[innermost, "weight"]  # a layer that is called with the weight of another
        return next((self.begins[owner] for owner in match.held.owners if owner in self.begins), None)

    def _keep(self, kept: KeptProduct, needs_gradient: bool) -> None:
        if not (needs_gradient and (torch.is_grad_enabled() or applying_function())):
            return
        if backward_pass() != -1 and repeated_frame() is not None:
            return  # a checkpoint that is not reentrant computes this again for its tensors, not for its graph
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


def _in_front(x: Tensor) -> Sequence[Tensor]:
    """What x may be a flattened view of: the operand of F.linear, or those of torch.matmul that are no matrices."""
    if len(whole.operands) < 2:
        return whole.operands
    left, right = whole.operands
    stacked = (*((left,) if left.dim() != 2 else ()), *((right.mT,) if right.dim() > 2 else ()))
    return stacked or (x,)


def _leading_axes(x: Tensor, frame: RunningModule | None) -> tuple[int, ...] | None:
    """The axes in front of the last that the tensor x [..., m, k] has in the model; None for one alone."""
    candidates: list[Any] = [*_in_front(x), *(tensors_in(frame.given) if frame else ())]
    for given in (*candidates, x if x._base is None else x._base):
        local = given._local_tensor if is_dtensor(given) else given
        if local.is_nested or not local.dim():
            continue
        if local.numel() == x.numel() and local.shape[-1] == x.shape[-1]:
            return tuple(local.shape[:-1])
    return None


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
