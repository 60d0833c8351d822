"""Begins the calls of a product, and observes the tensors of one call.

The random numbers of a pass depend only on its place, so that a repeated pass draws the same ones.

Activation recomputation runs a layer's forward pass twice, the second time during the backward pass. Both are computed
in the same way. The operands and results of the forward pass are recorded in the first, regardless of the kind of
checkpoint; the second adds only the gradients, and marks the layer as recomputed. So each tensor is recorded once.

    torch.utils.checkpoint, use_reentrant=True     the first pass is under no_grad, gradients belong to the second
    megatron's checkpoint, CheckpointWithoutOutput likewise
    torch.utils.checkpoint, use_reentrant=False    gradients belong to the first, the second only restores its operands

A pass that is computed again is recognized by its checkpoint (use_reentrant=False), else by the gradients:
`PassCounter.end` notes when those of a pass's results arrive, and the pass whose gradients arrived last is repeated.

A backward pass may run in parts or twice (retain_graph, pipelines that compute the gradients of weights later): what a
call has shown or scaled once, it neither shows nor scales again.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from binade.collector.capture.adapters.layer import InstrumentError, Layer, wrong_dtype
from binade.collector.capture.adapters.products import transformed
from binade.collector.capture.clock import IN_FLIGHT, Moment, backward_pass, checkpoint_frame, repeated_frame, seed_of
from binade.collector.capture.measure import Measurer, hidden_in, summarized
from binade.collector.capture.policy import Policy
from binade.collector.capture.rows import Draft
from binade.collector.capture.tried import Tried, specs_for, try_specs
from binade.collector.capture.valid import Valid
from binade.collector.models.parallel import Call
from binade.collector.probes.probe import Observation, Probes
from binade.collector.recipes.recipe import Part
from binade.data.run.tensor_kinds import LATER, OPERANDS, Gemm, Measure, Product, TensorKind
from binade.quant.delayed import ScaleHistory
from binade.quant.gemm import Observed, Rounding, Tap
from binade.quant.later import Later
from binade.quant.measurements import Summary
from binade.quant.memory import is_ordinary, ordinary, without_modes
from binade.quant.metrics import sqnr_later
from binade.quant.quantizer import DTYPES
from binade.quant.specs import GemmFormats, Spec

OPERAND_NAMES = frozenset(chain(LATER, *OPERANDS.values()))
FORWARD = frozenset(("a", "b", "y", "scores"))  # what a product shows in its forward pass
NAMED = {"a": "input", "b": "weight", "y": "result", "grad": "gradient"}
Stages = Sequence[tuple[int, Part]]  # parts of a recipe, each with the iteration from which it holds


def part_at(stages: Stages, iteration: int) -> Part:
    """The part that holds in an iteration."""
    return [part for start, part in stages if start <= iteration or not start][-1]


@dataclass(frozen=True)
class Observing:
    """What the products of a model are observed with.

    kinds    the tensors to record, by what a product shows
    places   of these tensors, see `TensorKind.place`
    scores   specs in which each operand is scored
    """

    kinds: Mapping[tuple[object, str], TensorKind]
    places: frozenset[str]
    scores: tuple[Spec, ...]
    measurer: Measurer
    probes: Probes

    def tap(self, layer: Layer, part: Part, product: Product, call: Passed, again: bool) -> Tap | None:
        """The observer of one call of one product; None if it is not recorded. again: the forward product is a
        recomputation, for which only the gradients are recorded."""
        moment = call.moment
        if not moment.recording or product.place not in self.places:
            return None
        drafts = self.measurer.drafts
        if again:
            drafts.recomputed.add((layer.site, moment))
        key = layer.site, product, moment
        scores = drafts.scores.get(key, {}) if again else {}
        drafts.scores[key] = scores
        if drafts.masked and not again:
            drafts.valid[moment] = drafts.masked
        return Observer(self, layer, part, product, moment, call.shown, scores, again, drafts.valid.get(moment))


@dataclass(eq=False)
class Passed:
    """A call of a forward pass, which may be computed again.

    moment  of the pass
    trains  whether its operands enter the histories of delayed scaling
    used    the scales of its operands with delayed scaling, see `quant.gemm.Rounding`
    shown   the names of the tensors of its backward pass that were seen
    frames  of the checkpoints that compute it
    task    the backward pass in which it was last computed again, and how often in that
    """

    moment: Moment
    trains: bool = True
    used: dict[str, Tensor] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)
    frames: WeakSet[Any] = field(default_factory=WeakSet)
    task: tuple[int, int] = (-1, 0)

    def times(self, task: int) -> int:
        """How often it was computed again in this backward pass."""
        return self.task[1] if self.task[0] == task else 0


@dataclass(eq=False)
class Hook:
    """Begins the calls of one product of one layer.

    stages      the parts that the recipe gives the product
    observing   None if the product is not recorded
    seed        of the run
    histories   of the operands with delayed scaling, see `quant.gemm.Rounding`
    """

    policy: Policy
    layer: Layer
    product: Product
    stages: Stages
    backend: str = "auto"
    observing: Observing | None = None
    seed: int = 0
    rank: int = 0
    histories: MutableMapping[str, ScaleHistory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.stages[0][1].formats
        self.varies = len(self.stages) > 1 or first.varies or first.cache is not None
        self.passed: deque[Passed] = deque(maxlen=IN_FLIGHT)
        self._fixed = Call(self.rounding(first))

    def rounding(
        self, formats: GemmFormats, seed: int = 0, used: dict[str, Tensor] | None = None, trains: bool = True
    ) -> Rounding:
        return Rounding(formats, self.backend, seed, self.histories, used, trains)

    def begin(self) -> Call:
        """The call that begins now."""
        policy = self.policy
        if transformed():
            return self._transformed()
        if twin := policy.clock.twin:
            return twin(self)
        observing = None if policy.idle else self.observing
        if not (observing or self.varies):
            return self._fixed
        again = backward_pass() != -1
        # Without gradients this is the first pass of a checkpoint within another: gradients come with the next.
        last = not again or torch.is_grad_enabled()
        call = self._repeated(last) if again else self._first()
        moment = call.moment
        part = part_at(self.stages, moment.iteration)
        part = part if moment.evaluation else part.in_training
        tap = observing.tap(self.layer, part, self.product, call, again) if observing and last else None
        if observing and tap and not again:
            observing.probes.before_product(self.layer, self.product, moment)
        if not self.varies:
            return Call(self._fixed.rounding, tap)
        place = self.rank, moment.iteration, moment.micro_batch, self.layer.site.name, self.product.value
        return Call(self.rounding(part.formats, seed_of(self.seed, *place), call.used, call.trains), tap)

    def _transformed(self) -> Call:
        """A call in a transform of torch.func. Raises InstrumentError if it would be rounded."""
        if any(part != Part() for _, part in self.stages):
            raise InstrumentError(
                f"{self.layer.name} runs in a transform of torch.func (vmap, grad, jvp), in which products are not "
                f"rounded: leave it out with exclude=[{self.layer.name!r}]"
            )
        if self.observing:
            warnings.warn("products in transforms of torch.func (vmap, grad, jvp) are not recorded", stacklevel=2)
        return self._fixed

    def _first(self) -> Passed:
        """A call that was not computed before."""
        moment = self.policy.begin()
        call = Passed(moment, trains=not moment.evaluation)
        if call.trains:
            while self.passed and self.passed[0].moment.iteration != moment.iteration:
                self.passed.popleft()
            self.passed.append(call)
            if (frame := checkpoint_frame()) is not None:
                call.frames.add(frame)
        return call

    def _repeated(self, last: bool) -> Passed:
        """The call that is computed again: of its checkpoint, if that is known, else of the pass whose gradients came
        last, because one backward pass goes through a forward pass from its end; where that is unknown (results in no
        tuple, list or mapping), the earliest. last: it is not repeated once more."""
        if not self.passed:
            return Passed(self.policy.begin(), trains=False)
        task, innermost, outer = backward_pass(), checkpoint_frame(), repeated_frame()
        calls = [call for call in self.passed if innermost in call.frames]
        calls = calls or [call for call in self.passed if outer in call.frames and not call.times(task)]
        if not calls:
            arrived = {call.moment for call in self.passed} & self.policy.clock.arrived.keys()
            latest = next((moment for moment in reversed(self.policy.clock.arrived) if moment in arrived), None)
            calls = [call for call in reversed(self.passed) if call.moment == latest] or [*self.passed]
        call = min(calls, key=lambda call: (call.times(task), call.task[0] != -1))
        call.frames.update(frame for frame in (innermost, outer) if frame is not None)
        if last:
            call.task = task, call.times(task) + 1
        return call


@dataclass(eq=False)
class Observer:
    """The tap of one call of one product.

    shown      the names of the tensors of the backward pass that were seen, also by other observers of this call
    scores     of each operand that was recorded, by the name that it has in the product
    valid      the micro-batch's tokens that are not padding, if there is a mask
    result     the last result that came with the exact one, until it is recorded
    """

    observing: Observing
    layer: Layer
    part: Part
    product: Product
    moment: Moment
    shown: set[str]
    scores: dict[str, list[Tried]]
    again: bool
    valid: Valid | None = None
    result: Observed | None = None

    def __call__(self, seen: Observed) -> None:
        if seen.name not in FORWARD and seen.name != "product":
            if seen.name in self.shown:  # in an earlier backward pass through this call
                return
            self.shown.add(seen.name)
        with without_modes(), torch.no_grad():
            if type(seen.tensor) is not Tensor or not is_ordinary(seen.tensor):
                seen = replace(seen, tensor=self._ordinary(seen))
            self._see(seen)

    def _ordinary(self, seen: Observed) -> Tensor:
        try:
            return ordinary(seen.tensor)
        except TypeError as error:
            what = LATER.get(seen.name, seen.name)
            raise InstrumentError(
                f"{self.layer.name} cannot be recorded, because of its {NAMED.get(what, what)}: {error}"
            ) from None

    def _see(self, seen: Observed) -> None:
        name, observing = seen.name, self.observing
        if self.layer.site.expert is not None and not seen.tensor.numel():  # no token was routed to it
            return
        if self.moment.basic and name in LATER:
            return
        kind, draft = observing.kinds.get((self.product, LATER.get(name, name))), None
        if name in OPERAND_NAMES:
            self.result = None  # a result that was not recorded
        if not self.moment.basic and seen.exact and Measure.RESULT in observing.measurer.measures:
            self.result = seen
        if name in LATER:
            if kind and kind.observed in self.scores:
                gemm = Gemm(name.partition("_")[0])
                scores = self.scores[kind.observed]
                same = scores if self._part(seen).formats.is_same(name) else []
                specs = specs_for(observing.scores, kind.layer_type, kind.name)
                scores += try_specs(seen, specs, gemm, before=same, rows=self._rows(seen))
        elif kind and not (self.again and name in FORWARD):
            draft = self._record(seen, kind)
            self.scores[name] = draft.tried
        if observers := observing.probes.observers(name):
            summary = draft.summary if draft else None
            place = self.layer, self.product, self.moment, self.again
            shown = Observation(seen, *place, partial(self._values, seen), partial(self._summarized, seen), summary)
            for observe in observers:
                observe(shown)

    def _part(self, seen: Observed) -> Part:
        """The part of the recipe that rounds what was seen."""
        return Part() if seen.by_model else self.part

    def _record(self, seen: Observed, kind: TensorKind) -> Draft:
        measurer, site = self.observing.measurer, self.layer.site
        if seen.tensor.dtype not in DTYPES:
            raise wrong_dtype(self.layer, seen.tensor.dtype)
        identity = partial(
            measurer.identity,
            site,
            self.moment,
            quant_type=self._part(seen).quant_type_of(kind.operand),
            layer_type=kind.layer_type,
            component=kind.component,
            operation=kind.operation.value,
            phase=kind.phase.value,
            tensor_name=kind.name,
        )
        is_operand = kind.contracted_axis is not None
        scores, axis = (self.observing.scores, seen.dim) if is_operand else ((), None)
        sqnr = None
        if not is_operand and self.result:
            sqnr, self.result = self._result_sqnr(self.result, seen), None
        shard, rows = self.layer.shard(seen.name), self._rows(seen)
        left_out = None if rows is None or self.valid is None else self.valid.left_out
        place = site, identity, self.moment, scores, kind.gemm, axis, shard, sqnr
        return measurer.measure(seen, *place, rows=rows, tokens_left_out=left_out)

    def _result_sqnr(self, result: Observed, seen: Observed) -> Later[float]:
        """The SQNR of a product against the same product of unrounded operands. seen: what the model makes of it, which
        is recorded, and may be known to be hidden in part."""
        assert result.exact
        pair = result.exact(), result.tensor
        rows = self._rows(seen)
        if (hidden := hidden_in(seen, None)) is not None:
            pair = pair[0].reshape(hidden.shape), pair[1].reshape(hidden.shape)
            pair = pair[0].masked_fill(hidden, 0), pair[1].masked_fill(hidden, 0)
        if rows is not None:
            pair = pair[0].flatten(0, -2).index_select(0, rows), pair[1].flatten(0, -2).index_select(0, rows)
        return sqnr_later(*pair)

    def _rows(self, seen: Observed) -> Tensor | None:
        """The rows of the valid tokens; None for all: of a weight, and of an expert, which has tokens of its own."""
        of_weight = self.product is Product.LINEAR and LATER.get(seen.name, seen.name) in ("b", "grad_b")
        if self.valid is None or of_weight or self.layer.site.expert is not None:
            return None
        return self.valid.rows(tuple(seen.shape or seen.tensor.shape), seen.tensor.device)

    def _values(self, seen: Observed) -> Tensor:
        """Those of the valid tokens, [rows, columns], or all as they are."""
        rows = self._rows(seen)
        return seen.tensor if rows is None else seen.tensor.flatten(0, -2).index_select(0, rows)

    def _summarized(self, seen: Observed) -> Later[Summary]:
        return summarized(seen, self._values(seen), self._rows(seen))[0]


def version_of(x: Tensor) -> int:
    """Counts how often x's values were overwritten."""
    return 0 if x.is_inference() else x._version
