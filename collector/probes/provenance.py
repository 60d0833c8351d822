"""Finds where the first NaN or Inf of a step comes from.

Each call of a module notes whether its inputs, parameters, results and gradients are finite. The culprit is the first
module, in the order of execution, whose operands are finite and whose result is not: the innermost, since it ends
before those that contain it. Whatever a module computes between the calls of its submodules counts as its own.

What comes from outside the modules is told apart by what was finite last: weights are checked when a pass begins, and
before and after each step of an optimizer that holds them, with the gradients that it gets. So a weight is bad from the
start, or since a step, or because other code has written it.

On a GPU the notes stay there until the step ends, and are fetched in one asynchronous copy; so the operands of that
operation are gone by the time it is known. The event states their largest magnitude. The operands are kept on a CPU,
and on a GPU if it happens again in the steps after that. For the backward pass, a call holds its inputs until the
gradients have passed it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.engine import place
from binade.collector.capture.adapters.products import tensors_in, transformed
from binade.collector.capture.clock import Moment, gradient_of, parameters_of, running_backward
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.observer import version_of
from binade.collector.capture.writing import copy_later
from binade.collector.models.site import Site
from binade.collector.probes.probe import Finding, Probe, Recording
from binade.collector.probes.weight_history import FiniteNote, Notes, WeightCheck, WeightHistory
from binade.data.run.events import EventKind, Reached
from binade.data.words.text import and_more
from binade.quant.quantizer import DTYPES

FORWARD, BACKWARD = "forward", "backward"
GRADIENT, OPERAND, RESULT = "grad_output", "operand", "result"  # prefixes of the names of what is kept
MOST_CALLS = 1 << 16  # of modules, that a step may have
MOST_REACHED = 256  # operations that an event lists


Origin = tuple[int, str, str]  # where something not finite begins: (order, place, what happened)


@dataclass
class _ModuleCall:
    """A call of a module. Notes on its results and gradients have a position in the order of execution. outermost:
    whether the training loop called it."""

    name: str
    outermost: bool
    order: int
    operands: list[FiniteNote]
    parameters: Notes
    buffers: Notes
    results: list[tuple[int, FiniteNote]] = field(default_factory=list)
    arriving: list[tuple[int, FiniteNote]] = field(default_factory=list)  # gradients of its results
    leaving: list[tuple[int, FiniteNote]] = field(default_factory=list)  # of its inputs and parameters
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)  # with the version of the values
    gradients: list[Tensor] = field(default_factory=list)  # of its results
    awaited: int = 0  # gradients of its inputs that are still to come

    def made(self, operation: str) -> list[tuple[int, FiniteNote]]:
        return self.results if operation == FORWARD else self.leaving

    def origins(self, weights: WeightHistory) -> Iterator[Origin]:
        name = self.name or "the model"
        if bad := [path for path, note in self.parameters.items() if note.bad]:
            yield self.order, name, weights.explained(bad)
        elif any(note.bad for note in self.operands):
            if not self.name:
                yield self.order, "data", "the model's input is not finite: the NaN or Inf comes from the data"
            elif self.outermost:
                yield self.order, name, f"{name}: its input is not finite, and the training loop gave it that"
        elif (at := _first(self.results)) is not None:
            taken = _range((*self.operands, *self.parameters.values()))
            if unseen := weights.within(self.name, at):
                yield at, unseen[0].rpartition(".")[0] or "the model", weights.explained(unseen)
            elif bad := [path for path, note in self.buffers.items() if note.bad]:
                yield at, name, f"{name}, {FORWARD}: its buffer {bad[0]}{and_more(bad)} is not finite"
            else:
                yield at, name, f"{name}, {FORWARD}: its inputs are finite{taken}, but its result is not"
        elif (at := _first(self.arriving)) is not None:
            if not self.name:
                yield at, "loss", "the gradient of the model's result is not finite: the NaN or Inf comes from the loss"
            elif self.outermost:
                text = "the gradient of its result is not finite, and comes from outside of it"
                yield at, name, f"{name}, {BACKWARD}: {text}"
        elif (at := _first(self.leaving)) is not None:
            arrived = _range(note for _, note in self.arriving)
            text = f"the gradient of its result is finite{arrived}, but the one that it computes is not"
            yield at, name, f"{name}, {BACKWARD}: {text}"


def _is_wrapper(x: object) -> bool:
    """Whether it is a tensor of a subclass that holds others, such as a quantized weight."""
    return is_traceable_wrapper_subclass(x)


def stays(x: Tensor) -> bool:
    """Whether the notes on a tensor stay on its device, so that nothing waits for them."""
    return x.device.type != "cpu"


def _first(notes: Sequence[tuple[int, FiniteNote]]) -> int | None:
    return min((at for at, note in notes if note.bad), default=None)


def _range(notes: Iterable[FiniteNote]) -> str:
    """The largest magnitude of finite tensors, in words."""
    known = [note.absmax for note in notes if math.isfinite(note.absmax)]
    return f" (absmax {max(known):.3g})" if known else ""


class Provenance:
    """Follows the calls of the modules of a model. sites: of those that are recorded, by path."""

    def __init__(self, model: nn.Module, recording: Recording, sites: Mapping[str, Site]) -> None:
        self.recording, self.modules, self.sites = recording, dict(model.named_modules()), sites
        self.orders = count(1)  # from which the backward pass of each device takes, on a thread of its own
        self.open: list[_ModuleCall] = []
        self.ended: list[_ModuleCall] = []
        self.last: dict[nn.Module, _ModuleCall] = {}
        self.checks: list[WeightCheck] = []
        self.stepping: list[WeightCheck] = []  # of optimizers whose step is running, one within the other
        self.losses: list[tuple[int, FiniteNote]] = []
        self.waiting: list[FiniteNote] = []  # notes on a GPU
        self.weights = WeightHistory()
        self.known: dict[int, tuple[weakref.ref[Tensor], int, FiniteNote]] = {}
        self.kept = False
        self.found = False  # only the writer's thread writes it

    def __deepcopy__(self, _: object) -> Provenance:
        return self  # a copy of the model also has the hooks, which do nothing there

    def attach(self, undo: ExitStack) -> None:
        for name, module in self.modules.items():
            undo.callback(module.register_forward_pre_hook(partial(self._begins, name), with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(self._ends, with_kwargs=True).remove)
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and parameter.is_leaf:
                    hook = partial(self._parameter, module)
                    undo.callback(parameter.register_hook(hook).remove)

    def _note(self, x: Tensor, again: bool = False) -> FiniteNote | None:
        """again: even if its values seem not to have changed, as those that were written through .data."""
        if not (x.is_floating_point() and x.numel()) or is_dtensor(x) or _is_wrapper(x):
            return None
        version = version_of(x)
        known = self.known.get(id(x))
        if known and known[0]() is x and known[1] == version and not again:
            return known[2]
        values = x.detach() if x.layout is torch.strided else x.detach().coalesce().values()
        low, high = torch.aminmax(values.float() if x.itemsize == 1 else values)
        note = FiniteNote((low, high), not x.requires_grad)
        if stays(x) and (self.kept or not self.found):
            self.waiting.append(note)
        else:
            note.decide(float(low), float(high))
        self.known[id(x)] = weakref.ref(x), version, note
        return note

    def _notes(self, value: object) -> list[FiniteNote]:
        return [note for x in tensors_in(value) if (note := self._note(x))]

    def _named(self, tensors: Iterable[tuple[str, Tensor | None]], again: bool = False) -> Notes:
        """Those of a rank's part of a DTensor, too."""
        local = (
            (name, x.to_local() if is_dtensor(x) else x)  # type: ignore[attr-defined]
            for name, x in tensors
            if x is not None and not x.is_meta
        )
        return {name: note for name, x in local if (note := self._note(x, again))}

    def begin_pass(self) -> None:
        """A forward pass begins: check the weights, also those that code outside of their modules multiplies by."""
        parameters = self._named(self.modules[""].named_parameters(), again=True)
        self.checks.append(
            WeightCheck(next(self.orders), parameters, self.stepping[-1].optimizer if self.stepping else "")
        )

    def _held(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        held = set(map(id, parameters_of(optimizer)))
        return [(name, p) for name, p in self.modules[""].named_parameters() if id(p) in held]

    def before_step(self, optimizer: Optimizer) -> None:
        held = self._held(optimizer)
        gradients = self._named(((name, gradient_of(p)) for name, p in held), again=True)
        for note in gradients.values():
            note.mask = False
        parameters = self._named(held, again=True)
        self.stepping.append(WeightCheck(next(self.orders), parameters, type(optimizer).__name__, gradients))
        self.checks.append(self.stepping[-1])

    def after_step(self, optimizer: Optimizer) -> None:
        if self.stepping:
            self.stepping.pop().after = next(self.orders), self._named(self._held(optimizer), again=True)

    def log(self, loss: float | Tensor) -> None:
        """The training loop has logged the loss."""
        note = FiniteNote((torch.tensor(0.0),) * 2, False)
        if isinstance(loss, Tensor):
            note = self._note(loss.detach().reshape(1)) or note
        else:
            note.decide(loss, loss)
        self.losses.append((next(self.orders), note))

    def _begins(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.modules[name] is not module or transformed():
            return None
        if not name:
            self.open.clear()  # of a pass that raised
            if len(self.ended) > MOST_CALLS:  # where nothing tells the steps apart
                self.end(self.recording.clock.iteration)
        start = f"{name}." if name else ""
        parameters = self._named((start + last, p) for last, p in module.named_parameters(recurse=False))
        buffers = self._named((start + last, x) for last, x in module.named_buffers(recurse=False))
        outermost, operands = not self.open and not running_backward(), self._notes((args, kwargs))
        call = _ModuleCall(name, outermost, next(self.orders), operands, parameters, buffers)
        if not self.kept and torch.is_grad_enabled():
            held = (x for x in tensors_in((args, kwargs)) if self.found or not stays(x))
            call.inputs = [(x.detach(), version_of(x)) for x in held]
        self.open.append(call)
        self.last[module] = call
        return (_seen(args, view := partial(self._listened, call)), _seen(kwargs, view))

    def _listened(self, call: _ModuleCall, x: Tensor) -> Tensor:
        """x as passed to the module: a view, whose gradient is this call's share alone."""
        if not (torch.is_grad_enabled() and x.requires_grad and x.is_floating_point()) or is_dtensor(x):
            return x
        note, view = self._note(x), x.view_as(x)
        call.awaited += 1
        view.register_hook(partial(self._left, call))  # type: ignore[no-untyped-call]
        if note:
            self.known[id(view)] = weakref.ref(view), view._version, note
        return view

    def _gradient(self, of: list[tuple[int, FiniteNote]], gradient: Tensor) -> FiniteNote | None:
        if note := self._note(gradient.detach()):
            note.mask = False
            of.append((next(self.orders), note))
        return note

    def _arrived(self, call: _ModuleCall, gradient: Tensor) -> None:
        """The gradient of a result of the call."""
        note = self._gradient(call.arriving, gradient)
        if note and call.inputs:
            call.gradients.append(gradient.detach())

    def _left(self, call: _ModuleCall, gradient: Tensor) -> None:
        """The gradient of an input of the call."""
        self._made(call, gradient)
        call.awaited -= 1
        if not call.awaited:
            call.inputs.clear()
            call.gradients.clear()

    def _parameter(self, module: nn.Module, gradient: Tensor) -> None:
        if call := self.last.get(module):
            self._made(call, gradient)

    def _made(self, call: _ModuleCall, gradient: Tensor) -> None:
        """A gradient that the call's backward pass has computed."""
        note = self._gradient(call.leaving, gradient)
        if note is None or self.kept or not self.recording.entered:
            return
        before = (
            *call.operands,
            *call.parameters.values(),
            *(earlier_note for _, earlier_note in (*call.results, *call.arriving)),
        )
        if note.bad and call.arriving and not any(earlier_note.bad for earlier_note in before):
            inputs = [x for x, version in call.inputs if version_of(x) == version]  # those that are not written over
            self._keep(call.name, BACKWARD, call.gradients, inputs, [gradient.detach()])

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        call = next((open_call for open_call in reversed(self.open) if open_call is self.last.get(module)), None)
        if call is None:
            return
        del self.open[self.open.index(call) :]
        at = next(self.orders)
        for y in tensors_in(result):
            if note := self._note(y):
                call.results.append((at, note))
            if y.requires_grad and not is_dtensor(y):
                y.register_hook(partial(self._arrived, call))  # type: ignore[no-untyped-call]
        if not any(y.requires_grad for y in tensors_in(result)):
            call.inputs.clear()  # no backward pass will come
        self.ended.append(call)
        made = _first(call.results) is not None and not any(
            note.bad for note in (*call.operands, *call.parameters.values())
        )
        if made and not self.kept and self.recording.entered:
            self._keep(call.name, FORWARD, [], tensors_in((args, kwargs)), tensors_in(result))

    def _site(self, name: str) -> Site:
        return self.sites.get(name) or place(self.modules, name)[0]

    def _keep(
        self,
        name: str,
        operation: str,
        gradients: Iterable[Tensor],
        inputs: Iterable[Tensor],
        results: Iterable[Tensor],
    ) -> None:
        """Record the operands and the result of the culprit."""
        self.kept = True
        parameters = self.modules[name].parameters(recurse=False)
        for what, shown in ((GRADIENT, gradients), (OPERAND, (*inputs, *parameters)), (RESULT, results)):
            known = [x for x in shown if x.dtype in DTYPES and x.dim()]
            for number, x in enumerate(known, 1):
                self.recording.keep(f"non_finite_{what}{number}", x, self._site(name), operation)

    def end(self, iteration: int) -> None:
        """A step has ended: pass it to the writer's thread."""
        step = TracedStep(iteration, self.ended, self.checks, self.losses)
        waiting, self.waiting = self.waiting, []
        self.ended, self.checks, self.stepping, self.losses = [], [], [], []
        self.known.clear()
        self.last = {module: call for module, call in self.last.items() if call in self.open}
        if not self.recording.entered:
            return
        arrived = None
        if waiting:
            device = waiting[0].extremes[0].device
            flat = [x.to(device, non_blocking=True) for note in waiting for x in note.extremes]
            arrived = copy_later(torch.stack([x.float() for x in flat]))
        self.recording.report(partial(self._judge, step, waiting, arrived))

    def _judge(
        self, step: TracedStep, waiting: list[FiniteNote], arrived: tuple[Tensor, Callable[[], None]] | None
    ) -> Iterator[Finding]:
        """On the writer's thread."""
        if arrived:
            arrived[1]()
            for note, (low, high) in zip(waiting, arrived[0].view(-1, 2).tolist(), strict=True):
                note.decide(low, high)
        if origins := sorted(step.origins(self.weights)):
            self.found = True
            order, where, text = origins[0]
            site = self._site(where) if where in self.modules else None
            more = {
                "order": order - step.started,
                "layer": site.layer_index if site else None,
                "module": site.module if site else None,
                "chain": _chain(step.calls, step.started, order),
            }
            yield Finding(step.iteration, text, where, EventKind.NON_FINITE, more)


@dataclass
class TracedStep:
    """What was noted in a step."""

    iteration: int
    calls: list[_ModuleCall]
    checks: list[WeightCheck]
    losses: list[tuple[int, FiniteNote]]

    @property
    def started(self) -> int:
        return min((*(call.order for call in self.calls), *(check.order for check in self.checks)), default=0)

    def origins(self, weights: WeightHistory) -> Iterator[Origin]:
        """Updates what is known of the weights, too."""
        in_order: list[_ModuleCall | WeightCheck] = [*self.calls, *self.checks]
        in_order.sort(key=lambda noted: noted.order)
        steps: list[Origin] = []
        for noted in in_order:
            at = f"of iteration {self.iteration}"
            if isinstance(noted, _ModuleCall):
                weights.see(noted.order, noted.parameters, f"in the forward pass {at}")
            elif noted.gradients is None:
                made = f"the step of {noted.optimizer} made it" if noted.optimizer else ""
                weights.see(noted.order, noted.parameters, f"when a forward pass {at} began", made)
            else:
                weights.see(noted.order, noted.parameters, f"before the optimizer step {at}")
                steps += self._of_step(noted, noted.gradients, weights)
        yield from steps
        for call in self.calls:
            yield from call.origins(weights)
        for order, note in self.losses:
            if note.bad:
                text = "the loss that was logged is not finite, although the results and gradients of the model are"
                yield order, "loss", f"{text}: it was computed outside of the model"

    def _of_step(self, check: WeightCheck, gradients: Notes, weights: WeightHistory) -> Iterator[Origin]:
        """What the step of an optimizer got and made."""
        bad = [name for name, note in gradients.items() if note.bad]
        if bad:
            text = (
                f"the gradient of {bad[0]}{and_more(bad)} is not finite at the optimizer step, although those that the "
                "backward pass computed were: something in between made it so, such as their sum, unscaling or clipping"
            )
            yield check.order, bad[0].rpartition(".")[0] or "the model", text
        weights.stepped = True
        if check.after is None:
            return
        order, after = check.after
        given = "a gradient that is not finite" if bad else "finite weights and gradients"
        made = f"the step of {check.optimizer} in iteration {self.iteration} made it, from {given}"
        if new := weights.see(order, after, f"after the optimizer step of iteration {self.iteration}", made):
            yield order, new[0].rpartition(".")[0] or "the model", weights.explained(new)


def _chain(calls: list[_ModuleCall], started: int, origin: int) -> tuple[Reached, ...]:
    """What is not finite after the origin: the results of modules that contain no other such module, and of the model,
    the loss, and the gradients that these modules compute."""
    links = []
    # A module that returns its input, as the last one may, has the gradient of its input before that of its result.
    gradients = [at for call in calls for at, note in (*call.arriving, *call.leaving) if note.bad and at > origin]
    if any(_first(call.arriving) in gradients for call in calls if not call.name):
        links.append(Reached(min(gradients) - started, "loss", BACKWARD))
    for operation in (FORWARD, BACKWARD):
        made = ((call.name, _first(call.made(operation))) for call in reversed(calls))  # the first of several calls
        bad = {name: at for name, at in made if at is not None and at > origin}
        containing = {name[:at] for name in bad for at, letter in enumerate(name) if letter == "."}
        links += [
            Reached(at - started, name or "the model", operation)
            for name, at in bad.items()
            if not name or name not in containing
        ]
    return tuple(sorted(links, key=lambda link: (link.order, link.place != "loss"))[:MOST_REACHED])


def _seen(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested tuples, lists and dicts with their tensors replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_seen(member, change) for member in value)
    if type(value) is dict:
        return {name: _seen(member, change) for name, member in value.items()}
    return value


class FirstNonFinite(Probe):
    """Finds the first operation of a step that produces a NaN or Inf, and makes an event of it."""

    eager = True

    def __init__(self, traced: Sequence[Provenance]) -> None:
        self.traced = traced

    @classmethod
    def of(cls, instrumented: Instrumented) -> Self | None:
        recording = instrumented.recording
        if not recording.watch.find_nan:
            return None
        return cls(
            [
                Provenance(model, recording, {layer.name: layer.site for layer in survey.layers if not layer.part})
                for model, survey in instrumented.surveys.items()
            ]
        )

    def attach(self, undo: ExitStack) -> None:
        for provenance in self.traced:
            provenance.attach(undo)

    def begin_pass(self, moment: Moment) -> None:
        for provenance in self.traced:
            provenance.begin_pass()

    def before_step(self, optimizer: Optimizer) -> None:
        for provenance in self.traced:
            provenance.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        for provenance in self.traced:
            provenance.after_step(optimizer)

    def log(self, loss: float | Tensor) -> None:
        self.traced[0].log(loss)

    def end_iteration(self, iteration: int) -> None:
        for provenance in self.traced:
            provenance.end(iteration)
