"""Weights that stay the same although their gradients are not 0: the optimizer holds copies that nothing writes back,
or its updates are smaller than a step of the weight's dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.optimizer import Optimizer

from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.clock import gradient_of, parameters_of
from binade.collector.models.site import Site
from binade.collector.probes.probe import Finding, Observation, Probe, Recording
from binade.data.run.columns import TensorRow
from binade.data.run.tensor_kinds import Operation, Product
from binade.data.words.text import and_more

STEPS = 3  # of which no weight changes in any: in one, the learning rate may be 0, or the step was skipped

Values = tuple[float, ...]  # statistics that are the same for the same values


class UnchangedWeights(Probe):
    """Of several optimizers, some step less often: a weight is judged once its own has stepped, and one that no torch
    optimizer holds, where there are some, after STEPS comparisons."""

    observes = frozenset(("b",))

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.layers: dict[str, Layer] = {}
        self.held: WeakKeyDictionary[Optimizer, tuple[str, ...]] = WeakKeyDictionary()  # the weights, by site
        self.stepped: dict[str, int] = {}  # by site: the iteration of the last step of an optimizer with the weight
        self.step_before: dict[tuple[str, int], int | None] = {}  # the same, where a forward pass took the weight
        self.waiting: Counter[str] = Counter()  # by site: successive comparisons without a change or a step
        self.before: dict[str, tuple[int, Values]] = {}  # by site: the last iteration, and the weight's values
        self.with_gradient: set[str] = set()
        self.named: set[str] = set()
        self.still = 0  # successive recorded steps in which no weight has changed

    def observe(self, observed: Observation) -> None:
        if observed.product is Product.LINEAR and not observed.again:
            name = observed.layer.site.name
            if name not in self.layers:
                self.layers[name] = observed.layer
                self.held.clear()
            self.step_before.setdefault((name, observed.moment.iteration), self.stepped.get(name))

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self.held:
            held = set(map(id, parameters_of(optimizer)))
            self.held[optimizer] = tuple(name for name, layer in self.layers.items() if id(layer.weight) in held)
        updated = (name for name in self.held[optimizer] if self._has_gradient(name))
        self.stepped.update(dict.fromkeys(updated, self.recording.clock.iteration))

    def _has_gradient(self, name: str) -> bool:
        """Whether the step had a gradient of the weight, which the loop may have cleared to freeze it."""
        weight = self.layers[name].weight
        return isinstance(weight, nn.Parameter) and gradient_of(weight) is not None

    def see(self, rows: Sequence[TensorRow]) -> Iterator[Finding]:
        unchanged: dict[str, int] = {}  # by site: since which iteration
        changed = False
        iteration = max((row.identity.iteration or 0 for row in rows), default=0)
        for row in rows:
            name, kind = _name(row), row.identity
            if (kind.tensor_name, kind.operation) != ("weight", Operation.FORWARD) or kind.iteration is None:
                continue
            summary = row.summary
            values = (summary.min, summary.max, summary.mean, summary.std, summary.rms)
            before = self.before.get(name)
            if before and before[0] == kind.iteration:
                continue
            step = self.step_before.pop((name, kind.iteration), None)
            if before and name in self.with_gradient:
                if before[1] != values:
                    changed = True
                    self.waiting.pop(name, None)
                elif self._is_due(name, before[0], step):
                    unchanged[name] = before[0]
            self.with_gradient.discard(name)
            self.before[name] = kind.iteration, values
        self.with_gradient |= {
            _name(row) for row in rows if row.identity.tensor_name == "grad_weight" and row.summary.absmax > 0
        }
        self.still = 0 if changed else self.still + bool(unchanged)
        new = [name for name in unchanged if name not in self.named]
        if new and (changed or self.still == STEPS):
            self.named.update(new)
            text = (
                f"{new[0]} weight{and_more(new)} did not change from iteration {unchanged[new[0]]} to {iteration}, "
                "although the gradient is not 0: is it updated where the optimizer steps, and is the update larger "
                "than a step of its dtype?"
            )
            yield Finding(iteration, text, f"{new[0]} weight")

    def _is_due(self, name: str, first: int, step: int | None) -> bool:
        """Whether a weight should have changed since this iteration. step: the iteration of its last step."""
        if not self.stepped or (step is not None and step >= first):
            return True
        self.waiting[name] += 1
        return step is None and self.waiting[name] >= STEPS


def _name(row: TensorRow) -> str:
    return Site(row.identity.layer_index or 0, row.identity.module or "", row.identity.expert).name
