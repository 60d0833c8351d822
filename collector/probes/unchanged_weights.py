"""Weights that stay the same although their gradients are not 0: the optimizer holds copies that nothing writes back,
or its updates are smaller than a step of the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from binade.collector.models.site import Site
from binade.collector.probes.probe import Finding, Probe, Recording
from binade.data.segment import TensorRow
from binade.data.tensor_kinds import Operation

STEPS = 3  # of which no weight changes in any: in one, the learning rate may be 0, or the step was skipped

Values = tuple[float, ...]  # statistics that are the same for the same values


class UnchangedWeights(Probe):
    def __init__(self, recording: Recording) -> None:
        self.before: dict[str, tuple[int, Values]] = {}  # by site: the last iteration, and the weight's values
        self.with_gradient: set[str] = set()
        self.named: set[str] = set()
        self.still = 0  # successive recorded steps in which no weight has changed

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
            if before and name in self.with_gradient:
                if before[1] == values:
                    unchanged[name] = before[0]
                changed |= before[1] != values
            self.with_gradient.discard(name)
            self.before[name] = kind.iteration, values
        self.with_gradient |= {
            _name(row) for row in rows if row.identity.tensor_name == "grad_weight" and row.summary.absmax > 0
        }
        self.still = 0 if changed else self.still + bool(unchanged)
        new = [name for name in unchanged if name not in self.named]
        if new and (changed or self.still == STEPS):
            self.named.update(new)
            more = f" and {len(new) - 1} more" * (len(new) > 1)
            text = (
                f"{new[0]} weight{more} did not change from iteration {unchanged[new[0]]} to {iteration}, although the "
                "gradient is not 0: is it updated where the optimizer steps, and is the update larger than a step of "
                "its dtype?"
            )
            yield Finding(iteration, text, f"{new[0]} weight")


def _name(row: TensorRow) -> str:
    return Site(row.identity.layer_index or 0, row.identity.module or "", row.identity.expert).name
