"""Which tensor scale suits each operand: a sweep of powers of two over recorded values, and the result as a recipe.

x · 2^k is rounded to the format's elements and divided by 2^k, for k = k0 - margin, where 2^k0 is the scale that
delayed scaling with `scale=pow2` computes from the tensor's absmax. A loss scale of 2^k does the same to gradients.

Everything is computed from all values. A sample of a heavy-tailed tensor misses the few values that hold most of its
sum of squares, and then finds another best scale. Instead, values that every scale rounds alike are put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.collector.errors import AdviceError, ConfigError
from binade.collector.recipes.recipe import MODULES, PARTS, About, Part, Recipe
from binade.data.compare.evidence import Estimate, Measure, holm, paired, spread_of
from binade.data.index.catalog import SAME_IN_ITERATIONS, Catalog
from binade.data.run.tensor_kinds import OF_ROUTER
from binade.data.words.filter import Filter
from binade.quant.backends.counts import counted
from binade.quant.blocks import DENORMAL, SPECIAL, ZERO, code_tiers
from binade.quant.codes import decode_table
from binade.quant.formats import FORMATS
from binade.quant.metrics import score, sqnr_db
from binade.quant.quantizer import quantize
from binade.quant.specs import GemmFormats, Spec, SpecError

SCALED = tuple(name for name in FORMATS if "pow2" in FORMATS[name].scale_rules)
"""The formats that can have a scale of the tensor alone."""
MARGINS = range(-12, 13)
BLOCKS = ("tensor", "row", "128x128", "1x128", "1x32")
MOST_TENSORS = 16  # of an operand of a module
CHUNK = 1 << 22  # float32 values that are put into cells at a time
OPERAND = ["part", "module", "tensor_name"]
SQNR = Measure("sqnr_db", "SQNR", "dB", low_is_bad=True, format=".1f", resolution=0.1)
SHARE = Measure("share", "Share", "%")
ERRORS = {"sqnr_db": SQNR, "flush_to_zero": SHARE, "saturated": SHARE}


@dataclass(frozen=True, eq=False)
class Sweep:
    """
    trials    a row for each tensor and margin: OPERAND, tensor (its number), series (the same for a tensor in several
              iterations), iteration, margin, k, sqnr_db, flush_to_zero, saturated, and the share of its nonzero codes
              in each tier; a row with margin None is the tensor without a scale
    blocks    a row for each tensor and spec with blocks: OPERAND, tensor, block, spec, sqnr_db
    stability a row for each tensor and its previous recorded iteration: OPERAND, moved (by how much the best k
              changed) and lost (SQNR at the best k minus that at the previous best k, dB)
    of, unfit tensors with values on disk; how many of those that were read were 0 or not finite, and were left out
    """

    fmt: str
    trials: pd.DataFrame
    blocks: pd.DataFrame
    stability: pd.DataFrame
    of: int
    unfit: int


def tiers(spec: Spec) -> list[str]:
    """The tiers of the nonzero codes of a format, the widest mantissa first, denormals last."""
    names = set(code_tiers(spec.format.element)) - {ZERO, SPECIAL}
    return sorted(names, key=lambda name: 0 if name == DENORMAL else -int(name.split()[0]))


@dataclass(frozen=True)
class Best:
    """A group's margin, and all that its tensors cannot tell from the one with the highest median SQNR. The margin is 0
    if that is among them."""

    margin: int
    alike: tuple[int, ...]


def delayed(fmt: str, history: int = 1, margin: int = 0) -> Spec:
    """The spec of delayed scaling by powers of two.

    Raises ConfigError for a format that is not in SCALED.
    """
    if fmt not in SCALED:
        raise ConfigError(f"--format {fmt}: expected a format that can have a tensor scale alone: {', '.join(SCALED)}")
    return Spec.of(fmt, scale="pow2", history=history, margin=margin)


@dataclass(frozen=True, eq=False)
class Cells:
    """The finite values of a tensor, those together that every format in SCALED rounds alike at every scale 2^k.

    A bfloat16 or float16 value is a cell. float32 values with the same upper 16 bits are two cells, those without
    lower bits and the others: a format with up to 6 mantissa bits changes from one code to the next only at a value
    without lower bits.

    low             float64 [n]: the values of a cell without their lower bits
    value           float64 [n]: one value of each
    counts          int64 [n]
    above, squares  float64 [n]: the sums of x - low and of its square
    """

    low: np.ndarray
    value: np.ndarray
    counts: np.ndarray
    above: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """The cells of a tensor of any shape. Values that are not finite are left out."""
        if codes := counted(x):
            low, counts = codes.values.astype(np.float64), codes.counts
            cells = cls(low, low, counts, np.zeros(len(low)), np.zeros(len(low)))
        else:
            cells = cls._of_float32(x.detach().float().reshape(-1).numpy())
        used = np.isfinite(cells.value) & (cells.counts > 0)
        return cls(cells.low[used], cells.value[used], cells.counts[used], cells.above[used], cells.squares[used])

    @classmethod
    def _of_float32(cls, x: np.ndarray) -> Self:
        sums = [np.zeros(1 << 17) for _ in range(3)]
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            part = part[np.isfinite(part)]
            bits = part.view(np.uint32)
            cell = (bits >> 16 << 1 | ((bits & 0xFFFF) > 0)).astype(np.int64)
            above = part.astype(np.float64) - (bits & np.uint32(0xFFFF0000)).view(np.float32)
            for total, weights in zip(sums, (None, above, above * above), strict=True):
                total += np.bincount(cell, weights, minlength=1 << 17)
        counts, above, squares = sums
        cell = np.arange(1 << 17, dtype=np.uint32)
        codes = cell >> 1 << 16, (cell >> 1 << 16) | ((cell & 1) << 15)
        with np.errstate(invalid="ignore"):  # signalling NaN, which no value has
            low, value = (code.view(np.float32).astype(np.float64) for code in codes)
        return cls(low, value, counts.astype(np.int64), above, squares)

    @property
    def signal(self) -> float:
        """Σx²"""
        return float(self.counts @ self.low**2 + 2 * self.low @ self.above + self.squares.sum())

    def errors(self, fmt: str, k: int) -> dict[str, float]:
        """The errors of x · 2^k in a format (ERRORS), which are those of x, the share of nonzero codes in each tier,
        and k."""
        spec = Spec.of(fmt, scale="none")
        element = spec.format.element
        codes = quantize(torch.from_numpy(np.ldexp(self.value, k).astype(np.float32)), spec).unpacked_codes().flatten()
        q = np.ldexp(decode_table(element)[codes].double().numpy(), -k)
        e = q - self.low
        with np.errstate(over="ignore", invalid="ignore"):
            noise = float(self.counts @ e**2 - 2 * e @ self.above + self.squares.sum())
        nonzero = self.counts @ (self.value != 0)
        shares = {
            "flush_to_zero": self.counts @ ((self.value != 0) & (q == 0)) / nonzero if nonzero else math.nan,
            "saturated": self.counts @ (np.abs(np.ldexp(self.value, k)) > element.max) / max(self.counts.sum(), 1),
        }
        names = np.array(code_tiers(element))[codes.numpy()]
        used = {name: self.counts @ (names == name) for name in tiers(spec)}
        shares |= {name: count / max(sum(used.values()), 1) for name, count in used.items()}
        return {"sqnr_db": sqnr_db(self.signal, noise), "k": k} | {name: float(share) for name, share in shares.items()}


def by_scale(cells: Cells, absmax: float, fmt: str) -> pd.DataFrame:
    """The errors of a tensor at every scale 2^k from that of the largest to that of the smallest of MARGINS, and on to
    k = 0: `Cells.errors`, by k, with margin. absmax: the largest magnitude; finite and not 0."""
    usual = exponent(torch.tensor(absmax, dtype=torch.float32), fmt)
    ends = 0, usual - MARGINS[-1], usual - MARGINS[0]
    table = pd.DataFrame([cells.errors(fmt, k) for k in range(min(ends), max(ends) + 1)])
    return table.assign(margin=usual - table["k"]).set_index("k", drop=False)


def best_scale(table: pd.DataFrame) -> int:
    """Of a table of `by_scale`, the k with the highest SQNR, and of equal ones the nearest to margin 0."""
    return int(max(table.index, key=lambda k: (table["sqnr_db"][k], -abs(table["margin"][k]))))


def sweep(catalog: Catalog, where: Filter | None = None, fmt: str = "hifp8") -> Sweep:
    """Sweep the scales of the operands of the filter. Of an operand of a module, at most MOST_TENSORS are read, those
    of a tensor in successive iterations together.

    Raises ConfigError for the format, AdviceError if no operand has values on disk.
    """
    delayed(fmt)
    rows = _operands(catalog.tensors(where))
    if rows.empty:
        raise AdviceError(
            "no operand has values on disk: record a run, for example with binade run --quantization bf16, or choose "
            "another filter"
        )
    chosen, unfit = _sampled(rows), 0
    trials, blocks, stability = [], [], []
    for series, group in chosen.groupby("series", sort=True):
        previous: int | None = None
        for index, row in group.sort_values("iteration").iterrows():
            if not fits(row):
                unfit, previous = unfit + 1, None
                continue
            place = {name: row[name] for name in OPERAND} | {"tensor": index}
            x = catalog.load(row["tensor_id"])
            cells = Cells.of(x)
            table = by_scale(cells, row["absmax"], fmt)
            swept = table[table["margin"].isin(MARGINS)]
            trials += [
                place | {"series": series, "iteration": row["iteration"]} | errors
                for errors in (table.loc[0].to_dict() | {"margin": None}, *swept[::-1].to_dict("records"))
            ]
            blocks += [place | errors for errors in _blocks(x, int(row["contracted_axis"]), fmt)]
            best = best_scale(swept)
            if previous is not None:
                stale, most = cells.errors(fmt, previous)["sqnr_db"], swept["sqnr_db"][best]
                lost = 0.0 if stale == most else max(most - stale, 0.0)
                stability.append(place | {"moved": abs(best - previous), "lost": lost})
            previous = best
    if not trials:
        raise AdviceError("all operands that were read are 0 or not finite: choose another filter")
    moves = pd.DataFrame(stability, columns=[*OPERAND, "tensor", "moved", "lost"])
    return Sweep(fmt, pd.DataFrame(trials), pd.DataFrame(blocks), moves, len(rows), unfit)


def _operands(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of operands with values on disk, with their part of a recipe, and series."""
    names = {operand.name for operand in PARTS["qk"]}
    attention = rows["tensor_name"].isin(names).map({True: "qk", False: "pv"})
    of_router = rows["module"].fillna("").astype(str).str.contains(OF_ROUTER)
    part = attention.where(rows["layer_type"] == "attention", "linear").where(~of_router, "router")
    rows = rows.assign(part=part, module=rows["module"].fillna(""))
    known = {(part, operand.name) for part, operands in PARTS.items() for operand in operands}
    named = pd.MultiIndex.from_frame(rows[["part", "tensor_name"]]).isin(known)
    rows = rows[rows["contracted_axis"].notna() & rows["path"].notna() & (rows["numel"] > 0) & named]
    series = rows.groupby(list(SAME_IN_ITERATIONS), dropna=False, sort=True).ngroup()
    return rows.assign(series=series).reset_index(drop=True)


def _sampled(rows: pd.DataFrame) -> pd.DataFrame:
    """At most MOST_TENSORS rows of each operand: the last iterations of series that are spread evenly."""
    parts = []
    for _, tensors in rows.groupby(OPERAND, sort=True):
        last = tensors.sort_values("iteration").groupby("series").tail(MOST_TENSORS)
        names = sorted(last["series"].unique())
        count = min(len(names), max(1, MOST_TENSORS // int(last["series"].value_counts().max())))
        parts.append(last[last["series"].isin({names[i * len(names) // count] for i in range(count)})])
    return pd.concat(parts)


def fits(row: pd.Series) -> bool:
    """Whether a recorded tensor can be swept: it is finite and not 0."""
    return bool(0 < row["absmax"] < math.inf and not row["nans"] and not row["infs"])


def exponent(absmax: Tensor, fmt: str, margin: int = 0) -> int:
    """k of the scale 2^k that delayed scaling computes from a tensor's absmax, a float32 scalar."""
    spec = delayed(fmt, margin=margin)
    return int(torch.frexp(spec.scaling.of_largest(absmax, spec, absmax))[1]) - 1


def _blocks(x: Tensor, dim: int, fmt: str) -> Iterator[dict[str, object]]:
    """The SQNR with each block and scheme of the format."""
    for block in BLOCKS:
        for scale in Spec.of(fmt).format.scale_rules:
            try:
                spec = Spec.of(fmt, scale=scale, block=block)
            except SpecError:  # scale=none has no blocks
                continue
            yield {"block": block, "spec": str(spec), "sqnr_db": score(x.float(), spec, dim).sqnr_db}


def best_margin(trials: pd.DataFrame) -> Best:
    """The best margin of the tensors of a group. Margins differ if the SQNR does, paired over tensors, by more than its
    resolution (Holm)."""
    table = trials.dropna(subset="margin").pivot(index="tensor", columns="margin", values="sqnr_db")
    medians = table.median()
    best = max(medians.index, key=lambda margin: (medians[margin], -abs(margin)))
    others = [margin for margin in table.columns if margin != best]
    losses = [paired(SQNR, table[best].to_dict(), table[margin].to_dict(), "tensors") for margin in others]
    worse = {
        margin
        for margin, loss, apart in zip(others, losses, holm(losses), strict=True)
        if apart and loss.value > SQNR.resolution
    }
    alike = tuple(int(margin) for margin in table.columns if margin not in worse)
    return Best(0 if 0 in alike else int(best), alike)


def spread(trials: pd.DataFrame, margin: int | None, name: str) -> Estimate:
    """The median over tensors of a column of `trials` at a margin, with the 10th and 90th percentile."""
    rows = trials["margin"].isna() if margin is None else trials["margin"] == margin
    return spread_of(ERRORS.get(name, SHARE), trials.loc[rows, name])


def best_blocks(blocks: pd.DataFrame) -> pd.DataFrame:
    """Of a group, for each block the first of the format's schemes with the highest median SQNR, within its resolution:
    block, spec, sqnr_db."""
    medians = blocks.groupby(["block", "spec"], sort=False, as_index=False)["sqnr_db"].median()
    most = medians.groupby("block")["sqnr_db"].transform("max")
    best: pd.DataFrame = medians[medians["sqnr_db"] >= most - SQNR.resolution]
    return best.drop_duplicates("block", ignore_index=True)


def groups(table: pd.DataFrame, by: list[str]) -> Iterator[tuple[tuple[str, ...], pd.DataFrame]]:
    """The values of the columns `by`, and the rows that have them."""
    for key, rows in table.groupby(by):
        yield tuple(map(str, key)), rows


def recipe(sweep: Sweep, name: str, history: int) -> Recipe:
    """Delayed scaling with the best margin of each operand. A module has a table of its own where the margin of all
    modules together is distinguishably worse in it. Operands without values stay in bf16."""
    formats: dict[str, GemmFormats] = {}
    pooled: dict[tuple[str, str], int] = {}
    for (part, tensor), trials in groups(sweep.trials, ["part", "tensor_name"]):
        pooled[part, tensor] = best_margin(trials).margin
        spec = delayed(sweep.fmt, history, pooled[part, tensor])
        formats[part] = _with(formats.get(part, GemmFormats()), part, tensor, spec)
    for (part, module, tensor), trials in groups(sweep.trials, OPERAND):
        best = best_margin(trials)
        if part == "linear" and pooled[part, tensor] not in best.alike:
            key = f"{MODULES}.{module}"
            spec = delayed(sweep.fmt, history, best.margin)
            formats[key] = _with(formats.get(key, formats[part]), part, tensor, spec)
    about = About(title=f"{sweep.fmt} with delayed scales from a sweep")
    return Recipe(name, about=about).with_parts({key: Part.requested(sweep.fmt, x) for key, x in formats.items()})


def _with(formats: GemmFormats, part: str, tensor: str, spec: Spec) -> GemmFormats:
    """The formats of a part with this spec for the operands of a tensor."""
    changes: dict[str, Any] = {operand.field: spec for operand in PARTS[part] if operand.name == tensor}
    return replace(formats, **changes)
