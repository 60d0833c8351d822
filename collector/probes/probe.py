"""What all probes have in common: the moments of training that one may be told of, and what it may do then.

A probe has one method for each moment that it waits for, and its own state. It knows no other probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.clock import Clock, Moment
from binade.collector.capture.options import Watch
from binade.collector.capture.policy import Policy
from binade.collector.models.site import Site
from binade.collector.ranks import Ranks
from binade.data.run.columns import TensorRow
from binade.data.run.events import EventKind
from binade.data.run.tensor_kinds import Product, TensorKind
from binade.quant.gemm import Observed
from binade.quant.later import Later
from binade.quant.measurements import Summary


@dataclass(frozen=True)
class Finding:
    """What an event says: a sentence, and the tensor or module that it is about, as in "layer2.up weight".

    more   other fields of the event, see `data.run.events.Event`
    """

    iteration: int
    text: str
    place: str | None = None
    kind: EventKind = EventKind.WARNING
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Observation:
    """A tensor that a product of a layer has shown: an operand, a result or a gradient. Tensors are on their device.

    seen     the tensor, the name that it has in the product, and how it was rounded
    again    whether its forward pass is a recomputation
    values   returns its values, without those of padding: [rows, columns], or as the product has them
    summarize  returns the statistics of these values, without what the softmax does not see
    summary  the same; None if it was not recorded
    """

    seen: Observed
    layer: Layer
    product: Product
    moment: Moment
    again: bool
    values: Callable[[], Tensor]
    summarize: Callable[[], Later[Summary]]
    summary: Later[Summary] | None


class Recording(Protocol):
    """The Recorder, as a probe sees it.

    tensors   the names that the Recorder was given
    measures  as in `Recorder`
    entered   whether there is a run
    """

    clock: Clock
    policy: Policy
    ranks: Ranks
    watch: Watch
    tensors: frozenset[str]
    measures: frozenset[str]
    entered: bool

    def keep(self, name: str, x: Tensor, site: Site, operation: str) -> None:
        """Record a tensor of the current pass, even if others are not. Does nothing without a run."""

    def show(self, kind: TensorKind, layer: Layer, x: Tensor, moment: Moment) -> None:
        """Record a tensor of a kind that belongs to no product of the model, if `tensors` names it."""

    def publish_step(self) -> None:
        """Queue what was recorded of the optimizer's step, unless the end of the iteration does it."""

    def report(self, findings: Callable[[], Iterable[Finding]]) -> None:
        """Call a function on the writer's thread, in order with the writes, and make events of what it returns. Does
        nothing without a run."""


class Probe:
    """Does nothing. A subclass overrides the methods for the moments that it waits for: only these are called. All but
    `see` run on the thread that trains, and wait for no device.

    observes   the names of the tensors that `observe` gets, of NAMES
    eager      whether compiled modules run eagerly while the probe is there
    """

    observes: frozenset[str] = frozenset()
    eager = False

    def attach(self, undo: ExitStack) -> None:
        """The probe begins; what it attaches to the model is undone when it ends."""

    def begin_pass(self, moment: Moment) -> None:
        """A forward pass of the model begins, with gradients or without; of a micro-batch, or an evaluation."""

    def before_product(self, layer: Layer, product: Product, moment: Moment) -> None:
        """A product that is recorded is about to be computed, not for the second time."""

    def observe(self, observed: Observation) -> None:
        """A product has shown a tensor, without gradients of its own; it is recorded already if it is to be."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Any torch optimizer is about to step; if it is given a closure, with the gradients from before."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It has."""

    def log(self, loss: float | Tensor) -> None:
        """The training loop has logged the loss of the iteration."""

    def end_iteration(self, iteration: int) -> None:
        """An iteration in which a pass began is over: the next one begins, or the probe ends, maybe by an exception
        within the iteration."""

    def see(self, rows: Sequence[TensorRow]) -> Iterable[Finding]:
        """On the writer's thread: the rows of an iteration, or of a micro-batch where `Recorder.at` is used, before
        they are written. A probe of a run sees all; one of a model not those of its last iteration, which are written
        when that ends."""
        return ()

    def save(self, directory: Path) -> None:
        """Write what a run that is continued needs to a directory. Raises OSError."""

    def close(self) -> None:
        """The probe ends, without an exception. What it reports is still written."""


class Probes:
    """The probes that are there now. `during` adds one for a context; a moment is passed on to those that wait for it,
    in the order in which they were added."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: tuple[Probe, ...] = ()
        self._begun = False  # whether a pass has begun in this iteration
        self._collect()

    @contextmanager
    def during(self, probe: Probe) -> Iterator[None]:
        """A context in which the probe is there. Raises ValueError for one that observes tensors that do not exist."""
        if unknown := probe.observes - NAMES:
            expected = ", ".join(sorted(NAMES))
            raise ValueError(f"{type(probe).__name__} observes {min(unknown)!r}: expected some of {expected}")
        with ExitStack() as undo:
            probe.attach(undo)
            for method, register in STEPS.items():
                if _overrides(probe, method):
                    undo.callback(register(_without_arguments(getattr(probe, method))).remove)
            self._all = (*self._all, probe)
            self._collect()
            try:
                yield
            finally:
                self._all = tuple(active_probe for active_probe in self._all if active_probe is not probe)
                self._collect()
                if self._begun:
                    probe.end_iteration(self._clock.iteration)
            undo.close()
            probe.close()

    def _collect(self) -> None:
        """Note who waits for what: between the products of a step, the others cost nothing."""

        def waiting(method: str) -> tuple[Callable[..., Any], ...]:
            return tuple(getattr(probe, method) for probe in self._all if _overrides(probe, method))

        self._passes, self._products, self._logs = waiting("begin_pass"), waiting("before_product"), waiting("log")
        self._ends, self._seeing, self._saving = waiting("end_iteration"), waiting("see"), waiting("save")
        names = frozenset(name for probe in self._all for name in probe.observes)
        self._observing = {name: [probe.observe for probe in self._all if name in probe.observes] for name in names}

    def observers(self, name: str) -> Sequence[Callable[[Observation], None]]:
        """The methods that get tensors of this name."""
        return self._observing.get(name, ())

    def begin_pass(self, moment: Callable[[], Moment]) -> None:
        self._begun = True
        for begin in self._passes:
            begin(moment())

    def before_product(self, layer: Layer, product: Product, moment: Moment) -> None:
        for begin in self._products:
            begin(layer, product, moment)

    def log(self, loss: float | Tensor) -> None:
        for log in self._logs:
            log(loss)

    def end_iteration(self) -> None:
        """The iteration of the clock is over, if it has begun."""
        ends, self._begun = self._ends if self._begun else (), False
        for end in ends:
            end(self._clock.iteration)

    def see(self, rows: Sequence[TensorRow]) -> Iterator[Finding]:
        for see in self._seeing:
            yield from see(rows)

    def save(self, directory: Path) -> None:
        for save in self._saving:
            save(directory)


# What a product shows, see `quant.gemm.Observed`: its operands, its result, and the gradients of these.
NAMES = frozenset(("a", "b", "scores", "y", "grad", "grad_a", "grad_b"))
STEPS = {"before_step": register_optimizer_step_pre_hook, "after_step": register_optimizer_step_post_hook}


def _overrides(probe: Probe, method: str) -> bool:
    return getattr(type(probe), method) is not getattr(Probe, method)


def _without_arguments(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook of an optimizer, without the arguments of its step."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        method(optimizer)

    return hook
