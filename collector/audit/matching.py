"""Which spec made a weight from the original: the specs with the element and block of its layout, then `identify`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from binade.collector.audit.weights import CheckpointWeight
from binade.quant.elements import Element
from binade.quant.identification.candidates import specs
from binade.quant.identification.pair import Pair, differs, is_apart
from binade.quant.identification.search import identify
from binade.quant.options import Block
from binade.quant.specs import Spec

Kind = tuple[Element, Block]
PART = 1 << 20  # values that are rounded at once, and of which `identify` is asked
MOST = 4  # specs that are compared on all values of a weight, the simplest first


@dataclass(frozen=True)
class Match:
    """How a weight compares with a spec.

    spec       that makes the weight, or is nearest
    differing  how many values have other bits, apart: by more than two units in the last place
    values     of how many
    making     all specs that make it, to the bit if one does: a weight may not tell them apart
    identified what `identify` says, of the first weight of a kind that no spec makes
    """

    spec: Spec
    differing: int
    apart: int
    values: int
    making: tuple[Spec, ...] = ()
    identified: str = ""

    def words(self, spec: Spec) -> str:
        """How it compares, with one of `making`, or `spec`."""
        if not self.differing:
            return f"bit-equal to {spec}"
        return f"as {spec}, up to two units in the last place" if not self.apart else f"not those of {spec}"


@dataclass
class Matcher:
    """Matches the weights of a checkpoint in turn. `identify` takes seconds, so it is asked once for a kind of weight
    that no spec makes; the others of the kind are compared with the spec that it names."""

    _nearest: dict[Kind, Spec] = field(default_factory=dict)

    def match(self, x: Tensor, weight: CheckpointWeight) -> Match | None:
        """x: the original, [..., out, in]. None if no format here has such codes and blocks."""
        element, block = weight.decoded.element, weight.decoded.block
        if element is None or block is None:
            return None
        kind = element, block
        possible = [spec for spec in specs((block,)) if (spec.format.element, spec.block) == kind]
        possible.sort(key=lambda spec: len(str(spec)))  # the simplest first
        if not possible:
            return None
        pair = Pair.of(x, weight.decoded.values, -1 % x.dim())
        found = self._of_specs(pair, possible)
        if found and not found.apart:
            return found
        if kind in self._nearest:
            return _compared(pair, self._nearest[kind])
        part = next(pair.parts(possible[0], PART))
        identified = identify(part.x, part.q, among=possible, dim=-1, absmax=float(pair.absmax))
        best = next(iter((*identified.matches, *identified.nearest)), None)
        if best is None:
            return None
        self._nearest[kind] = best.spec
        of_part = f", of the first {len(part.x):,} of {len(pair.x):,} lines" if len(part.x) < len(pair.x) else ""
        return replace(_compared(pair, best.spec), identified=f"{best}{of_part}")

    def _of_specs(self, pair: Pair, possible: list[Spec]) -> Match | None:
        """The specs that make all values, else one that comes nearest; None if none is near in a few blocks."""
        tried = {spec: _matched(spec, [pair.few(spec)], pair) for spec in pair.surviving(possible)}
        near = [spec for spec in tried if not tried[spec].apart]
        near = [spec for spec in near if not tried[spec].differing] or near
        found = [_compared(pair, spec) for spec in near[:MOST]]
        best = min(found, key=lambda match: (match.apart, match.differing), default=None)
        if best is None or best.apart:
            return best
        exact = not best.differing
        return replace(best, making=tuple(m.spec for m in found if not (m.differing if exact else m.apart)))


def _compared(pair: Pair, spec: Spec) -> Match:
    """All values against the spec."""
    return _matched(spec, pair.parts(spec, PART), pair)


def _matched(spec: Spec, parts: Iterable[Pair], whole: Pair) -> Match:
    """Parts of a pair against the spec, with the tensor scale of the whole."""
    differing = apart = values = 0
    for part in parts:
        y = whole.rounded(spec, part)
        different = differs(y, part.q)
        differing += int(different.sum())
        apart += int(is_apart(y[different], part.q[different]).sum())
        values += part.q.numel()
    return Match(spec, differing, apart, values)
