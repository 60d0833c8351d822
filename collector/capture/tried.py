"""The error of a format on an operand of a GEMM: measured while that is in memory, fetched when its step ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from binade.data.run.columns import RoundedWith, Score
from binade.data.run.tensor_kinds import Gemm, has_tokens
from binade.quant.backends.counts import Counted
from binade.quant.block_histograms import Histogram
from binade.quant.gemm import Observed
from binade.quant.later import Later, LaterPart
from binade.quant.measurements import Errors
from binade.quant.metrics import (
    errors_from_later,
    errors_later,
    of_original,
    score_blocks_later,
    score_of_rows_later,
    scores_later,
)
from binade.quant.reference import absmax_over
from binade.quant.specs import TENSOR, Spec
from binade.quant.transform import transform, untransformed


@dataclass
class Tried:
    """One spec on one operand of one GEMM; used: whether the GEMM rounded the operand to it, and then with what.
    second_sqnr: of the second rounding alone, if the GEMM rounded what the forward GEMM had rounded; infinite if it
    took that as it was."""

    spec: Spec
    gemm: Gemm | None
    used: bool
    errors: Later[Errors]
    blocks: Later[dict[str, Histogram]] | None = None
    rounded_with: Later[RoundedWith] = field(default_factory=lambda: Later.known(RoundedWith()))
    second_sqnr: Later[float] | None = None

    @property
    def results(self) -> list[Later[Any]]:
        results = self.errors, self.blocks, self.rounded_with, self.second_sqnr
        return [result for result in results if result]

    def score(self) -> Score:
        return Score(
            format=str(self.spec),
            gemm=self.gemm,
            used=self.used,
            second_sqnr_db=self.second_sqnr() if self.second_sqnr else None,
            rounded_with=self.rounded_with(),
            error=self.errors(),
            blocks=self.blocks() if self.blocks else {},
        )


@lru_cache(maxsize=256)  # asked for every tensor of a recorded step
def specs_for(specs: tuple[Spec, ...], layer_type: str | None, name: str | None) -> tuple[Spec, ...]:
    """Those of the specs that an operand of this name may be rounded to: without tokens, none with center=tokens."""
    return tuple(spec for spec in specs if has_tokens(layer_type, name) or not spec.centered)


def try_specs(
    seen: Observed,
    specs: Sequence[Spec],
    gemm: Gemm | None,
    blocks: bool = False,
    codes: Counted | None = None,
    before: Sequence[Tried] = (),
    rows: Tensor | None = None,
) -> list[Tried]:
    """The spec that the operand was rounded to, with the error that this made, and each of the specs. blocks:
    whether to measure them too. codes: `counted` of its tensor, if known. before: what was tried on the same tensor in
    another GEMM; a spec without blocks does the same along each axis. rows: of [rows, columns], those of which the
    error is measured, without blocks; of all where a rotation mixes rows. On a GPU nothing waits for it."""
    trials = []
    used = seen.spec
    if seen.source is not None and seen.spec is None:  # the GEMM takes what the forward GEMM rounded
        forward = [trial for trial in before if trial.used and trial.gemm == Gemm.FORWARD]
        nothing = Later.known(math.inf)
        trials = [replace(one, gemm=gemm, blocks=None, second_sqnr=nothing) for one in forward]
        used = forward[0].spec if forward else None
    if rows is not None:
        return trials + _tried_of_rows(seen, [spec for spec in specs if spec != used], gemm, rows)
    if seen.spec and used and seen.coded is not None and seen.quantized is not None:
        trials.append(_measured(seen, seen.spec, gemm, blocks))
    formerly = {trial.spec: trial for trial in before if not trial.used}
    specs = [spec for spec in specs if spec != used]
    flat = [spec for spec in specs if not spec.has_blocks and not spec.transforms]
    again = {spec: formerly[spec] for spec in flat if spec in formerly}
    tried = [spec for spec in specs if spec not in again]
    scores = dict(zip(tried, scores_later(seen.tensor, tried, seen.dim, blocks, codes), strict=True))
    for spec in specs:
        if spec in again:
            trials.append(replace(again[spec], gemm=gemm, blocks=None))
        else:
            trials.append(Tried(spec, gemm, False, *scores[spec]))
    return trials


def _tried_of_rows(seen: Observed, specs: Sequence[Spec], gemm: Gemm | None, rows: Tensor) -> list[Tried]:
    dim, used = seen.dim, seen.spec
    every = torch.arange(seen.tensor.flatten(0, -2).shape[0], device=rows.device)

    def rows_of(spec: Spec) -> Tensor:
        return every if spec.hadamard and dim != -1 else rows

    trials = []
    if used and seen.coded is not None and seen.quantized is not None:
        used_rows, again = rows_of(used), None
        errors = score_of_rows_later(seen.coded, untransformed(used), dim, used_rows, seen.quantized, seen.absmax)
        if seen.source is not None:
            errors, again = _from_tensor(seen, used, used_rows), errors.map(_sqnr)
        errors = _of_original(errors, seen, used, used_rows)
        trials.append(Tried(used, gemm, True, errors, rounded_with=_rounded_with(seen, used), second_sqnr=again))
    for spec in specs:
        if spec != used:
            trials.append(Tried(spec, gemm, False, score_of_rows_later(seen.tensor, spec, dim, rows_of(spec))))
    return trials


def _measured(seen: Observed, spec: Spec, gemm: Gemm | None, blocks: bool) -> Tried:
    """The error that rounding the operand made."""
    x, q = seen.coded, seen.quantized
    assert x is not None and q is not None
    plain, histograms, again = untransformed(spec), None, None
    if blocks and seen.scales is not None and x.numel() and seen.source is None:
        errors, histograms = score_blocks_later(x, plain, seen.dim, q, seen.scales, seen.absmax)
    else:
        errors = errors_later(x, q, plain, seen.scales, seen.dim, seen.absmax)
    if seen.source is not None:
        errors, again = _from_tensor(seen, spec), errors.map(_sqnr)
    errors = _of_original(errors, seen, spec)
    return Tried(spec, gemm, True, errors, histograms, rounded_with=_rounded_with(seen, spec), second_sqnr=again)


def _sqnr(errors: Errors) -> float:
    return errors.sqnr_db


def _from_tensor(seen: Observed, spec: Spec, rows: Tensor | None = None) -> Later[Errors]:
    """The error of an operand that was rounded twice, in its coded values, against the tensor before any rounding."""
    x, plain = transform(seen.tensor, spec, seen.dim, seen.sign_seed), untransformed(spec)
    assert seen.coded is not None and seen.quantized is not None
    return errors_from_later(x, seen.coded, seen.quantized, plain, seen.scales, seen.dim, seen.absmax, rows)


def _rounded_with(seen: Observed, spec: Spec) -> Later[RoundedWith]:
    """What the operand was rounded with. The scale of a spec without a history follows from the statistics of the
    tensor, which the row has: see `rows.completed`. That of the second of two roundings follows from the first."""
    seeds = RoundedWith(
        noise_seed=seen.noise_seed if spec.noisy else None,
        sign_seed=seen.sign_seed if spec.signs == "random" else None,
    )
    if seen.absmax is None and seen.source is not None and seen.coded is not None and not spec.transforms:
        absmax = LaterPart(absmax_over(seen.coded, seen.dim, TENSOR))
        return Later(lambda most: replace(seeds, tensor_scale=spec.scaling.of_tensor(spec, float(most))), absmax)
    if seen.absmax is None:
        return Later.known(seeds)
    return Later(lambda scale: replace(seeds, tensor_scale=float(scale)), LaterPart(seen.absmax))


def _of_original(errors: Later[Errors], seen: Observed, spec: Spec, rows: Tensor | None = None) -> Later[Errors]:
    """The errors of the operand, or of some of its rows, from those of its coded values."""
    if not spec.centered or seen.rounded is None:
        return errors
    x, q = seen.tensor, seen.rounded()
    if rows is not None:
        x, q = (t.flatten(0, -2).index_select(0, rows) for t in (x, q))
    return of_original(errors, x, q)
