"""`identify`: which spec gave these values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from binade.quant.conformance.inputs import cases
from binade.quant.elements import RoundingMode
from binade.quant.identification import faults
from binade.quant.identification.alterations import ALTERATIONS, Alteration
from binade.quant.identification.candidates import ROTATIONS, specs
from binade.quant.identification.common import common
from binade.quant.identification.pair import Pair, differs, is_apart
from binade.quant.identification.readings import CodeReading, readings
from binade.quant.identification.result import Identification, SpecOutcome
from binade.quant.memory import ordinary, without_modes
from binade.quant.quantizer import fake_quantize
from binade.quant.rotation import rotate
from binade.quant.specs import TENSOR, Spec

ROTATED = 2.0**-18  # relative to the largest value of a line: what rotating there and back leaves in float32
DEVIATIONS = 5  # within which rounding up and down is as often as by chance
NEAREST, VERIFIED, ALTERED = 3, 200, 24


@dataclass(frozen=True)
class Attempt:
    """A way in which q may have been made: the share of the sample that has other bits, and that is apart."""

    spec: Spec
    pair: Pair
    share: float
    apart: float
    compute: Callable[[Pair], Tensor]
    words: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[float, float, int]:
        return self.apart, self.share, len(str(self.spec))


def identify(
    x: Tensor,
    q: Tensor,
    scales: Tensor | None = None,
    *,
    tensor_scale: float | None = None,
    block: str | None = None,
    among: Sequence[Spec] | None = None,
    dim: int | None = None,
    absmax: float | None = None,
) -> Identification:
    """Which spec gives q from x, bit for bit; if none does, the nearest ones and what the values that differ have in
    common.

    Args:
        x: The values before rounding: float32, bfloat16 or float16, any shape.
        q: What was made of them. Values in one of these dtypes, of x's shape; or codes: a float8 dtype, or uint8 or
            int8, of x's shape, or packed along one axis (two 4-bit codes to a byte, four 6-bit codes to three bytes).
        scales: With codes: the block scales, float32, bfloat16, float8_e8m0fnu, float8_e4m3fn, or uint8 as E8M0 or
            E4M3. Each axis of x is a multiple of that of the scales, rounded up. None: the codes are the values.
        tensor_scale: With codes: a further factor. None: found, if one is needed.
        block: A further block to try, such as "1x48".
        among: The only specs to try, which must be deterministic and not rotated. None: all below.
        dim: The axis along which they are tried. None: each.
        absmax: The largest magnitude of the tensor that x is a part of, from which tensor scales follow. None: of x.

    Every format is tried with each scale rule, common blocks, both roundings to nearest and along each axis; then
    rotations by 16 to 128; then what kernels do otherwise, see `quant.identification.alterations` and `faults`. Not
    tried: delayed scaling, centering, random signs, MS-EDEN.

    Raises TypeError or ValueError for tensors that do not fit together.
    """
    x, q = ordinary(x), ordinary(q)
    extra = (Spec.of("mxfp8", block=block).block,) if block else ()
    tried = specs(tuple(one for one in extra if one)) if among is None else tuple(among)
    axes = _axes(x) if dim is None else [dim % x.dim()]
    with without_modes():
        read = readings(x, q, None if scales is None else ordinary(scales), tensor_scale)
        pairs = [(reading, Pair.of(x, reading.q, axis, absmax)) for reading in read for axis in axes]
        found = _first_that_match(pairs, tried)
        matches = _simplest(outcome for _, outcome in found if outcome.matches)
        exact = [outcome for outcome in matches if outcome.exact]
        best = tuple(exact or matches)
        nearest = () if best else _nearest(found)
        return Identification(best, nearest, _told_apart(best), (len(tried), len(axes)))


def _axes(x: Tensor) -> list[int]:
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    return axes[::-1] or [x.dim() - 1]


def _simplest(outcomes: Iterable[SpecOutcome]) -> list[SpecOutcome]:
    """Each spec once: for one without an axis, that of the first."""
    found: dict[object, SpecOutcome] = {}
    for outcome in sorted(outcomes, key=lambda one: (len(one.words), len(str(one.spec)))):
        if outcome.spec.block in (None, TENSOR) and not outcome.spec.transforms:
            outcome = replace(outcome, dim=None)
        found.setdefault((outcome.spec, outcome.dim, outcome.words), outcome)
    return list(found.values())


def _first_that_match(
    pairs: Sequence[tuple[CodeReading, Pair]], tried: Sequence[Spec]
) -> list[tuple[Attempt, SpecOutcome]]:
    """The trials of the first stage that has a match, verified, else of all."""
    plain: list[list[Attempt]] = []
    for reading, pair in pairs:
        chosen = [spec for spec in tried if reading.fits(spec.format.element)]
        plain.append(sorted(_plain(pair, chosen), key=lambda trial: trial.order))
    found = _verified([(reading, trials) for (reading, _), trials in zip(pairs, plain, strict=True)])
    for stage in (_random, _altered, _rotated, _of_other_scales):
        if any(outcome.exact for _, outcome in found):
            break
        staged = []
        for (reading, pair), trials in zip(pairs, plain, strict=True):
            chosen = [spec for spec in tried if reading.fits(spec.format.element)]
            staged.append((reading, sorted(stage(pair, chosen, trials), key=lambda trial: trial.order)))
        found += _verified(staged)
    if not any(outcome.matches for _, outcome in found):
        for (reading, _), trials in zip(pairs, plain, strict=True):
            found += [(trial, _outcome(trial, reading)) for trial in _best_of_formats(trials)]
    return found


def _verified(staged: Sequence[tuple[CodeReading, list[Attempt]]]) -> list[tuple[Attempt, SpecOutcome]]:
    """On all values, of each reading and axis: the trials without a difference in the sample, else those that are not
    apart."""
    found: list[tuple[Attempt, SpecOutcome]] = []
    waiting: list[tuple[CodeReading, Attempt]] = []
    for reading, trials in staged:
        good = [trial for trial in trials if trial.share == 0][:VERIFIED]
        close = [trial for trial in trials if trial.apart == 0][:ALTERED]
        likely, others = _divided(good or close)
        found += [(trial, _outcome(trial, reading)) for trial in likely]
        waiting += [(reading, trial) for trial in others]
    if any(outcome.exact for _, outcome in found):
        return found
    return found + [(trial, _outcome(trial, reading)) for reading, trial in waiting]


def _divided(trials: list[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
    """(the trials without a difference in a band of the tensor, which is larger than the sample; of the others those
    that are not apart there and the nearest). In a large tensor, a hundred specs can agree with the sample, and each
    takes a second on all values. Trials with an alteration are not divided: theirs may depend on the place."""
    likely: list[Attempt] = []
    others: list[tuple[int, int, int, Attempt]] = []
    for place, trial in enumerate(trials):
        band = trial.pair.band
        y = None if trial.words or band is trial.pair else trial.compute(band)
        if y is None or not (different := differs(y, band.q)).any():
            likely.append(trial)
        else:
            others.append((int(is_apart(y, band.q).sum()), int(different.sum()), place, trial))
    nearest = sorted(others)[:ALTERED]
    return likely, [*(one[-1] for one in nearest), *(one[-1] for one in sorted(others)[ALTERED:] if one[0] == 0)]


def _best_of_formats(trials: list[Attempt]) -> list[Attempt]:
    """The nearest trials of each format: samples of blocks of other shapes do not have the same values."""
    count: Counter[str] = Counter()
    chosen = []
    for trial in trials:
        count[trial.spec.format.name] += 1
        if count[trial.spec.format.name] <= NEAREST:
            chosen.append(trial)
    return chosen[:ALTERED]


def _outcome(trial: Attempt, reading: CodeReading) -> SpecOutcome:
    """The outcome of a trial on all values."""
    pair = trial.pair
    y = trial.compute(pair)
    different = differs(y, pair.q)
    count = int(different.sum())
    outcome = SpecOutcome(trial.spec, pair.dim, trial.words, reading.words, count, 0, pair.q.numel())
    if not count:
        return outcome
    line, place = divmod(int(different.reshape(-1).to(torch.uint8).argmax()), pair.q.shape[1])
    x, q, expected = (float(t[line, place]) for t in (pair.x, pair.q, y.to(pair.q.dtype)))
    apart = int(is_apart(y, pair.q, ROTATED if trial.spec.hadamard else 0.0).sum())
    return replace(outcome, apart=apart, first=pair.index(line, place), x=x, q=q, expected=expected)


def _nearest(found: list[tuple[Attempt, SpecOutcome]]) -> tuple[SpecOutcome, ...]:
    """The outcomes with the fewest differences, and what the values that differ have in common."""
    chosen: dict[tuple[object, ...], tuple[Attempt, SpecOutcome]] = {}
    for trial, outcome in sorted(found, key=lambda one: (one[1].apart, one[1].differing, len(one[1].name))):
        chosen.setdefault((outcome.spec.format, outcome.apart, outcome.first), (trial, outcome))
    nearest = []
    for trial, outcome in list(chosen.values())[:NEAREST]:
        if not trial.spec.transforms and not trial.words:
            different = differs(trial.compute(trial.pair), trial.pair.q)
            outcome = replace(outcome, common=common(trial.pair, trial.spec, different))
        nearest.append(outcome)
    return tuple(nearest)


def _trial(
    pair: Pair,
    spec: Spec,
    compute: Callable[[Pair], Tensor],
    *words: str,
    absolute: float = 0.0,
    part: Pair | None = None,
) -> Attempt:
    part = part or pair.sample(spec)
    y = compute(part)
    different = differs(y, part.q)
    share = float(different.double().mean())
    apart = float(is_apart(y, part.q, absolute).double().mean()) if share else 0.0
    return Attempt(spec, pair, share, apart, compute, words)


def _plain(pair: Pair, tried: Sequence[Spec]) -> Iterator[Attempt]:
    usual = [spec for spec in tried if spec == Spec.of(spec.format)]
    for spec in pair.surviving(tried) or usual:
        yield _trial(pair, spec, lambda part, spec=spec: pair.rounded(spec, part))  # type: ignore[misc]


def _rotated(pair: Pair, tried: Sequence[Spec], plain: Sequence[Attempt]) -> Iterator[Attempt]:
    """q as it is rounded, left rotated, and rotated back."""
    small = pair.sample(Spec.of("mxfp8"))
    short = [spec for spec in tried if (spec.block and spec.block.size == 16) or spec.scaling.per_element]
    for signs, size in ROTATIONS:
        if pair.x.shape[1] % size or small.x.shape[1] % size:
            continue
        rotation = Spec.of("mxfp8", hadamard=size, signs=signs)
        turned = rotate(small.x, rotation, -1, 0)
        for back in (False, True):
            absolute = ROTATED if back else 0.0
            q = rotate(small.q, rotation, -1, 0) if back else small.q
            if not Pair(turned, q, 1, tuple(q.shape)).surviving(short, absolute):
                continue
            whole = Pair(
                rotate(pair.x, rotation, -1, 0),
                rotate(pair.q, rotation, -1, 0) if back else pair.q,
                *(pair.dim, pair.shape),
            )
            for spec in whole.surviving(tried, absolute):
                if back:
                    yield from _turned_back(pair, whole, Spec.of(spec, hadamard=size, signs=signs), spec)
                else:
                    words = f"rotated by hadamard={size}, signs={signs} and not rotated back"
                    yield _trial(whole, spec, lambda part, spec=spec, whole=whole: whole.rounded(spec, part), words)  # type: ignore[misc]


def _turned_back(pair: Pair, whole: Pair, spec: Spec, plain: Spec) -> Iterator[Attempt]:
    trial = _trial(whole, plain, lambda part: whole.rounded(plain, part), absolute=ROTATED)
    if trial.apart == 0:
        yield Attempt(spec, pair, trial.share, 0.0, lambda part: pair.rounded(spec, part))


def _altered(pair: Pair, tried: Sequence[Spec], plain: Sequence[Attempt]) -> Iterator[Attempt]:
    """Each alteration of the specs that explain the sample: those that change most values, as they change scales or how
    values are rounded, of all; the others of the nearest."""
    usual = [trial.spec for trial in plain if _is_usual(trial.spec)]
    for place, spec in enumerate(usual):
        for alteration in ALTERATIONS:
            changes_most = alteration.scale or alteration.factors or alteration.round
            if not alteration.of(spec) or (place >= ALTERED and not changes_most):
                continue
            if alteration.round and not faults.is_between(pair, spec):
                continue
            compute, few = _computed(pair, spec, alteration), pair.few(spec)
            if is_apart(compute(few), few.q).any():
                continue
            trial = _trial(pair, spec, compute, alteration.words)
            if trial.apart == 0:
                yield trial


def _is_usual(spec: Spec) -> bool:
    return spec.rounding == spec.format.rounding and spec.overflow == spec.format.overflow


def _computed(pair: Pair, spec: Spec, alteration: Alteration) -> Callable[[Pair], Tensor]:
    return lambda part: pair.rounded(spec, part, alteration)


def _random(pair: Pair, tried: Sequence[Spec], plain: Sequence[Attempt]) -> Iterator[Attempt]:
    """Rounded stochastically: each value is one of its two neighbors, and as often the upper one as it should be."""
    for spec in pair.surviving(tried):
        if spec.rounding == RoundingMode.NEAREST and RoundingMode.STOCHASTIC in spec.scaling.roundings:
            stochastic = Spec.of(spec, rounding="stochastic")
            if not faults.is_between(pair, spec) or faults.from_stochastic(pair, spec, pair.few(spec)) > DEVIATIONS:
                continue
            compute = faults.either_neighbor(pair, spec)
            trial = _trial(pair, stochastic, compute, "with another source of random numbers")
            if trial.apart == 0 and faults.from_stochastic(pair, spec, pair.sample(spec)) < DEVIATIONS:
                yield trial


def _of_other_scales(pair: Pair, tried: Sequence[Spec], plain: Sequence[Attempt]) -> Iterator[Attempt]:
    """The absmax of another tensor, scales of another place, swapped codes, rounding along the other axis first."""
    usual = [spec for spec in tried if _is_usual(spec)]
    explained = {trial.spec for trial in plain if trial.apart == 0}  # but for the order of multiplications
    for spec in pair.surviving(usual):
        if spec.of_tensor and spec not in explained and (found := faults.other_absmax(pair, spec)):
            yield _trial(pair, spec, *found)
    swapped = replace(pair, q=faults.swapped(pair.q)) if pair.x.shape[1] % 2 == 0 else None
    four_bits = [spec for spec in usual if spec.format.element.bits == 4]
    if swapped and pair.dim == len(pair.shape) - 1:
        for spec in swapped.surviving(four_bits):
            words = "the two codes of each byte are swapped"
            yield _trial(pair, spec, lambda part, spec=spec: faults.swapped(pair.rounded(spec, part)), words)  # type: ignore[misc]
    possible = [spec for spec in pair.surviving(usual, near=False) if faults.may_be_misread(pair, spec)]
    for spec in sorted(possible, key=_likely_first)[:ALTERED]:
        for found in faults.misread(pair, spec):
            trial = _trial(pair, spec, *found, part=pair.head)
            if trial.apart == 0:
                yield trial


def _likely_first(spec: Spec) -> tuple[bool, int, int]:
    """Specs with the block of their format come first, then those of few bits."""
    own = spec.block == Spec.of(spec.format).block
    return not own, spec.format.element.bits, len(str(spec))


def _told_apart(matches: Sequence[SpecOutcome]) -> dict[SpecOutcome, str]:
    """For each match but the first, the kind of input on which its spec differs from that of the first."""
    if not matches:
        return {}
    first, *others = matches
    found = {}
    for outcome in others:
        if outcome.words == first.words and outcome.spec != first.spec:
            found[outcome] = _distinguishing(first.spec, outcome.spec)
    return found


def _distinguishing(a: Spec, b: Spec) -> str:
    for case in cases(a, -1):
        if differs(fake_quantize(case.x, a), fake_quantize(case.x, b)).any():
            return case.name
    return ""
