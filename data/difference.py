"""Two runs of the same model and data, tensor by tensor: from other machines, versions, backends or parallel layouts.

Tensors are matched by what they are, regardless of the rank or shard that has them. This module reads the runs' own
files, not an index, so the two runs may be in different roots. Runs of which one is imported are matched by place, see
data.matching, and a difference counts from what their dtypes explain.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from binade.data.cache import Done
from binade.data.coverage import FormatDifference, differing, recorded_formats
from binade.data.matching import Key, explained, matched, same_layout
from binade.data.names import name_of
from binade.data.runs import IMPORT, RunError, RunInfo, read_steps
from binade.data.segment import COUNTS, MOMENTS, read_tables
from binade.data.store import TensorFileError
from binade.data.tensor_kinds import LINEAR, NORM, TENSOR_KINDS, Operation
from binade.data.text import describe, natural

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 2.0**-5
"""The largest relative difference that counts as equal by default: four units in the last place of bfloat16. A sum in a
different order, or in parts, may be rounded differently, and a product accumulates the differences of its inputs."""
EXPLAINED: Literal["explained"] = "explained"
Tolerance = float | Literal["explained"] | None
"""A relative difference, EXPLAINED for each tensor's own limit, or None for no difference in any bit."""


def default_tolerance(*configs: Mapping[str, Any]) -> Tolerance:
    """What counts as equal in two runs unless the user says otherwise. configs: their run.json."""
    return EXPLAINED if any(config.get("kind") == IMPORT for config in configs) else TOLERANCE


# The fields that identify a tensor of a step; ranks and shards are not among them.
IDENTITY = (
    "iteration", "micro_batch", "layer_index", "module", "expert", "layer_type", "component", "operation", "phase",
    "tensor_name", "stage", "dp_rank",
)  # fmt: skip
# The fields of run.json that say what is quantized, besides the recipe.
OVERRIDES = (
    "linear_quant", "qk_quant", "pv_quant", "router_quant", "forward_quant", "dgrad_quant", "wgrad_quant",
    "operand_quant", "softmax", "skip_layers",
)  # fmt: skip
# Those that are the same in two runs of the same model, data and recipe.
SETTINGS = (
    "model", "size", "layers", "vocab_size", "dataset", "seed", "recipe", "learning_rate", "warmup_iterations",
    "micro_batches", "micro_batch_size", "sequence_length", *OVERRIDES,
)  # fmt: skip
RECORDED = re.compile(r"r\d+-(\d+)")  # an id, with the number of the tensor among those that its rank recorded
ORDER = "execution_order"
CHUNK = 1 << 24  # values that are compared at once
Row = dict[str, Any]


class IncompleteError(ValueError):
    """A part of a tensor was not recorded, or its values were not kept."""


def joined(parts: Sequence[Tensor], shard: str | None, axis: int | None, stride: int | None) -> Tensor:
    """The whole tensor from the parts of tensor-parallel ranks, in their order; see `segment.Shard`. Partial results
    are summed in float32 and returned in their dtype."""
    import torch  # here, so that only reading values waits for it

    if shard == "partial":
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    if shard != "slice":
        return parts[0]
    assert axis is not None
    pieces = [part.chunk(stride or 1, axis) for part in parts]
    return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group], axis)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that both runs have.

    place         a description of the tensor; iteration to tensor_name: as in the index
    by            values or statistics; shape where the shapes differ
    difference    of values ‖a − b‖₂ / ‖a‖₂, Inf if only one is NaN or Inf somewhere; of statistics the largest of the
                  changes of rms and mean by rms, and of absmax, min and max by absmax; Inf if the shapes differ
    largest, at   the largest difference of two values, and where; None without values
    equal         whether all values have the same bits; without values, whether all statistics have
    dtype, dtype_b
    limit         the largest difference that counts as equal if no tolerance is given
    """

    place: str
    iteration: int | None
    micro_batch: int | None
    layer_index: int | None
    module: str | None
    operation: str | None
    tensor_name: str | None
    by: str
    difference: float
    equal: bool
    shape: tuple[int, ...]
    shape_b: tuple[int, ...]
    tensor_id: str
    tensor_id_b: str
    largest: float | None = None
    at: tuple[int, ...] | None = None
    dtype: str = ""
    dtype_b: str = ""
    limit: float = TOLERANCE

    def differs(self, tolerance: Tolerance) -> bool:
        """Whether it differs by more than the tolerance, or for None in any bit."""
        if tolerance is None:
            return not self.equal
        return not self.difference <= (self.limit if isinstance(tolerance, str) else tolerance)


@dataclass(frozen=True)
class Difference:
    """The comparison of two runs: the tensors of both, in the order of execution in the first; descriptions of those
    that only one has, or has in part; one sentence for each difference of settings or data; and the operands that are
    not rounded to the same format, or that one did not record, in the iterations that both recorded.

    tolerance: see `default_tolerance`.

    in_order_of_names: whether the order of execution is not known for all of these tensors, as of an imported run whose
    tool does not say. Those of which it is known come first, the others follow in the natural order of their names."""

    rows: tuple[TensorDifference, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    formats: tuple[FormatDifference, ...] = ()
    in_order_of_names: bool = False
    tolerance: Tolerance = TOLERANCE

    def first(self, tolerance: Tolerance) -> int | None:
        """The index of the first row that differs, see `TensorDifference.differs`; None if none does."""
        return next((index for index, row in enumerate(self.rows) if row.differs(tolerance)), None)


@dataclass
class _Whole:
    """A tensor of a run, with a row for each rank that has it or a part of it. reads: as of `difference`."""

    run: RunInfo
    reads: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.rows[0]["shard"] or "whole")

    @property
    def every_row(self) -> list[Row]:
        """With those of other micro-batches, of a sum."""
        return self.rows

    @property
    def parts(self) -> list[Row]:
        """The parts by tensor-parallel rank; for a tensor that every rank has whole, the first rank's."""
        rows = sorted(self.rows, key=lambda row: row["tp_rank"] or 0)
        return rows[:1] if self.kind == "whole" else rows

    def check(self) -> None:
        """Raise IncompleteError if a part is missing."""
        if self.kind != "whole" and len(self.rows) < self.rows[0]["tp_size"]:
            raise IncompleteError("a tensor-parallel rank did not record its shard")

    @property
    def shape(self) -> tuple[int, ...]:
        """() if it is not known."""
        parts = self.parts
        shape = [int(size) for size in parts[0]["shape"] or ()]
        if self.kind == "slice":
            shape[parts[0]["shard_axis"]] = sum(part["shape"][part["shard_axis"]] for part in parts)
        return tuple(shape)

    @property
    def tensor_id(self) -> str:
        return f"{self.run.run_id}/{self.rows[0]['tensor_id']}"

    @property
    def logged(self) -> set[str]:
        """What is known of it: not all if another tool logged only statistics."""
        return {name for name in ("shape", *MOMENTS, *COUNTS) if self.parts[0][name] is not None}

    @property
    def has_values(self) -> bool:
        return all(part["path"] for part in self.parts)

    def values(self) -> Tensor:
        """Raises TensorFileError."""
        parts = self.parts
        axis, stride = parts[0]["shard_axis"], parts[0]["shard_stride"]
        return joined([self._load(part) for part in parts], self.kind, axis, stride)

    def _load(self, row: Row) -> Tensor:
        self.reads(f"{self.run.run_id}/{row['tensor_id']}")
        if Path(row["path"]).is_absolute() and self.run.config.get("kind") != IMPORT:
            raise TensorFileError(
                f"{row['tensor_id']} refers to a file outside its run's directory, "
                "which is allowed only for imported tensors"
            )
        from binade.data.foreign import load_values  # imports torch

        return load_values(self.run.directory, row)

    def statistics(self) -> dict[str, float]:
        """Statistics of the whole tensor, NaN for one that is not known. Raises IncompleteError for a sum, whose
        statistics cannot be computed from its parts."""
        parts = self.parts
        if len(parts) == 1:
            known = {name: parts[0][name] for name in (*MOMENTS, *COUNTS)}
            return {name: math.nan if value is None else value for name, value in known.items()}
        if self.kind == "partial":
            raise IncompleteError("it is a sum over ranks, which needs values to compare")
        of = {name: np.array([part[name] for part in parts], float) for name in ("numel", *MOMENTS, *COUNTS)}
        statistics = {name: of[name].sum() for name in COUNTS}
        counts = of["numel"] - of["nans"] - of["infs"]
        some = counts > 0
        weights = counts[some] / counts.sum()
        statistics["mean"] = weights @ of["mean"][some] if some.any() else math.nan
        statistics["rms"] = math.sqrt(weights @ of["rms"][some] ** 2) if some.any() else math.nan
        statistics |= {name: np.fmin.reduce(of[name][some], initial=math.nan) for name in ("min", "absmin")}
        statistics |= {name: np.fmax.reduce(of[name][some], initial=math.nan) for name in ("max", "absmax")}
        return {name: float(value) for name, value in statistics.items()}


@dataclass
class _Sum(_Whole):
    """A gradient of a weight, summed over the micro-batches of a step; rows: of the first. wholes: of all."""

    wholes: list[_Whole] = field(default_factory=list)

    def check(self) -> None:
        for whole in self.wholes:
            whole.check()
        if not self.has_values:
            raise IncompleteError("it is a sum over micro-batches, which needs values to compare")

    @property
    def every_row(self) -> list[Row]:
        return [row for whole in self.wholes for row in whole.rows]

    @property
    def has_values(self) -> bool:
        return all(whole.has_values for whole in self.wholes)

    def values(self) -> Tensor:
        total = self.wholes[0].values().double()
        for whole in self.wholes[1:]:
            total = total + whole.values().double()
        return total


def difference(
    a: RunInfo,
    b: RunInfo,
    only: Collection[str] | None = None,
    done: Done = lambda count, of: None,
    reads: Callable[[str], None] = lambda tensor_id: None,
) -> Difference:
    """Compare two runs. Raises RunError for a damaged one.

    Args:
        only: The ids of the tensors of `a` to compare, run/tensor; None for all.
        done: Called with (how many tensors are compared, of how many).
        reads: Called with the id of each tensor whose values are read, run/tensor.
    """
    ours, theirs = _tensors(a, reads), _tensors(b, reads)
    tolerance = default_tolerance(a.config, b.config)
    imported = tolerance == EXPLAINED
    formats = _formats(_only(ours, a, only), theirs, only is not None)
    parts: list[str] = []
    if not imported:
        ours, theirs, parts = _by_step(ours, theirs)
    ours = _only(ours, a, only)
    rows, incomplete = [], []
    pairs = matched([*ours], [*theirs]) if imported else {key: key for key in ours if key in theirs}
    unordered = [a.config.get("kind") == IMPORT and _unordered(ours, pairs),
                 b.config.get("kind") == IMPORT and _unordered(theirs, pairs.values())]  # fmt: skip
    common = [key for key in ours if key in pairs]
    if unordered == [True, False]:
        places = {key: place for place, key in enumerate(theirs)}
        common.sort(key=lambda key: places[pairs[key]])
    for number, key in enumerate(common, 1):
        try:
            rows.append(_compared(key, ours[key], pairs[key], theirs[pairs[key]], imported))
        except (IncompleteError, TensorFileError, OSError) as error:
            incomplete.append(f"{_place(key)}: {describe(error)}")
        done(number, len(common))
    if imported:
        limits = explained([(row.difference, row.dtype, row.dtype_b) for row in rows])
        rows = [replace(row, limit=limit) for row, limit in zip(rows, limits, strict=True)]
    return Difference(
        tuple(rows),
        tuple(_place(key) for key in ours if key not in pairs),
        tuple(_place(key) for key in theirs if key not in pairs.values()) if only is None else (),
        tuple(incomplete),
        (*_notes(a, b, bool(parts)), *parts, *_factor(ours, theirs, pairs)),
        formats,
        all(unordered),
        tolerance,
    )


def _only(tensors: dict[Key, _Whole], run: RunInfo, only: Collection[str] | None) -> dict[Key, _Whole]:
    if only is None:
        return tensors
    return {
        key: whole
        for key, whole in tensors.items()
        if any(f"{run.run_id}/{row['tensor_id']}" in only for row in whole.every_row)
    }


# The places of fields in a key, and tensors of weights that depend on no micro-batch, or are added up over those of a
# step.
ITERATION, MICRO_BATCH, OPERATION, NAME = (
    IDENTITY.index(n) for n in ("iteration", "micro_batch", "operation", "tensor_name")
)
WEIGHTS = frozenset(kind.name for kind in TENSOR_KINDS if kind.observed == "b" and kind.product in (LINEAR, NORM))
GRADIENTS = frozenset(
    kind.name for kind in TENSOR_KINDS if kind.observed == "grad_b" and kind.product in (LINEAR, NORM)
)


def _by_step(
    ours: dict[Key, _Whole], theirs: dict[Key, _Whole]
) -> tuple[dict[Key, _Whole], dict[Key, _Whole], list[str]]:
    """The tensors to compare of steps that the runs take in other micro-batches, and a sentence about them: gradients
    of weights as sums over the step, weights once, and what the optimizer has. Tensors of a single micro-batch are left
    out."""
    counts = [_micro_batches(run) for run in (ours, theirs)]
    shapes = [_inputs(run) for run in (ours, theirs)]
    steps = [
        step
        for step in counts[0].keys() & counts[1].keys()
        if len(counts[0][step]) != len(counts[1][step]) or _is_divided(shapes[0].get(step, {}), shapes[1].get(step, {}))
    ]
    if not steps:
        return ours, theirs, []
    first, chosen = min(steps), frozenset(steps)
    summed, left = zip(*(_summed(run, chosen) for run in (ours, theirs)), strict=True)
    several = (
        f"The steps of {len(steps)} iterations, from {first} on, have" if len(steps) > 1 else f"Iteration {first} has"
    )
    numbers = [len(count[first]) for count in counts]
    text = (
        f"{numbers[0]} and {numbers[1]} micro-batches" if numbers[0] != numbers[1] else "micro-batches of other sizes"
    )
    sentence = (
        f"{several} {text}: gradients of weights are compared as sums over the step, weights once; {left[0]:,} and "
        f"{left[1]:,} tensors of single micro-batches are not compared."
    )
    return summed[0], summed[1], [sentence]


def _micro_batches(run: Mapping[Key, _Whole]) -> dict[int, set[int]]:
    """Those of each iteration that train."""
    found: dict[int, set[int]] = {}
    for key in run:
        if key[MICRO_BATCH] is not None and key[ITERATION] is not None and key[OPERATION] != Operation.EVALUATION:
            found.setdefault(key[ITERATION], set()).add(key[MICRO_BATCH])
    return found


def _inputs(run: Mapping[Key, _Whole]) -> dict[int, dict[Key, list[tuple[int, ...]]]]:
    """The shapes of the inputs of linear layers in each iteration, by what they are."""
    found: dict[int, dict[Key, list[tuple[int, ...]]]] = {}
    for key, whole in run.items():
        if key[NAME] == "input" and key[OPERATION] == Operation.FORWARD and key[MICRO_BATCH] is not None:
            found.setdefault(key[ITERATION], {}).setdefault(_of_step(key), []).append(whole.shape)
    return found


def _is_divided(a: Mapping[Key, list[tuple[int, ...]]], b: Mapping[Key, list[tuple[int, ...]]]) -> bool:
    """Whether as many tokens are divided into micro-batches of other sizes."""

    def total(shapes: list[tuple[int, ...]]) -> int:
        return sum(map(math.prod, shapes))

    return any(a[key] != b[key] and total(a[key]) == total(b[key]) for key in a.keys() & b.keys())


def _of_step(key: Key) -> Key:
    """The key of what a tensor contributes to in its step: without micro-batch and call."""
    return (*key[:MICRO_BATCH], None, *key[MICRO_BATCH + 1 : -1], 0)


def _summed(run: Mapping[Key, _Whole], steps: Collection[int]) -> tuple[dict[Key, _Whole], int]:
    """(the tensors of a run, with those of these steps as `_by_step` says; how many are left out)"""
    chosen: dict[Key, _Whole] = {}
    left = 0
    for key, whole in run.items():
        divided = key[ITERATION] in steps and key[MICRO_BATCH] is not None and key[OPERATION] != Operation.EVALUATION
        if not divided:
            chosen[key] = whole
        elif key[NAME] in GRADIENTS:
            step_sum = chosen.setdefault(_of_step(key), _Sum(whole.run, whole.reads, whole.rows))
            assert isinstance(step_sum, _Sum)
            step_sum.wholes.append(whole)
        elif key[NAME] in WEIGHTS:
            chosen.setdefault(_of_step(key), whole)
        else:
            left += 1
    return chosen, left


def _factor(ours: Mapping[Key, _Whole], theirs: Mapping[Key, _Whole], pairs: Mapping[Key, Key]) -> Iterator[str]:
    """A sentence if the sums of one run are those of the other times a number, in the first layer and the last of the
    first of these steps."""
    sums = [key for key, whole in ours.items() if isinstance(whole, _Sum) and whole.has_values and key in pairs]
    sums = [key for key in sums if key[ITERATION] == sums[0][ITERATION]]
    factors = []
    for key in dict.fromkeys((*sums[:1], *sums[-1:])):
        other = theirs[pairs[key]]
        if not other.has_values or other.shape != ours[key].shape:
            return
        x, y = ours[key].values().double(), other.values().double()
        factor = float((x * y).sum() / (x * x).sum()) if x.any() else math.nan
        if not float((factor * x - y).norm()) <= TOLERANCE * float(y.norm()):
            return
        factors.append(factor)
    same = factors and all(abs(factor - factors[0]) <= TOLERANCE * abs(factors[0]) for factor in factors)
    if same and abs(factors[0] - 1) > TOLERANCE:
        yield (
            f"The sums of RUN_B are {factors[0]:.4g} times those of RUN_A in iteration {sums[0][ITERATION]}, as where "
            "one of them does not divide the loss by the number of its micro-batches."
        )


def _unordered(tensors: Mapping[Key, _Whole], keys: Collection[Key]) -> bool:
    """Whether the order of execution is not known of all of these tensors of an import."""
    return any(row[ORDER] is None for key in keys for row in tensors[key].rows)


def _formats(ours: Mapping[Key, _Whole], theirs: Mapping[Key, _Whole], of_ours: bool) -> tuple[FormatDifference, ...]:
    """of_ours: of the operands of the first run alone."""
    both = {key[0] for key in ours} & {key[0] for key in theirs}
    a, b = (
        recorded_formats(row for key, whole in run.items() if key[0] in both for row in whole.rows)
        for run in (ours, theirs)
    )
    return differing(a, {operand: fmt for operand, fmt in b.items() if operand in a or not of_ours})


def _tensors(run: RunInfo, reads: Callable[[str], None]) -> dict[Key, _Whole]:
    """A run's tensors in the order of execution. A key ends with how often the rank had recorded that identity
    before."""
    wholes: dict[Key, _Whole] = {}
    order: dict[Key, int] = {}
    places: Counter[int] = Counter()
    seen: Counter[tuple[int, Key]] = Counter()
    rows: list[Row] = []
    for segment in run.segments:
        try:
            directory, written = run.directory / "segments" / segment, run.manifest_of(segment)
            tables = read_tables(directory, written, ["tensor", "score"])
            tensors: list[Row] = [row | {"rounded": {}} for row in tables["tensor"].to_pylist()]
            for score in tables["score"].select(["row", "gemm", "format", "used"]).to_pylist():
                rounded = tensors[score["row"]]["rounded"]
                rounded[score["gemm"]] = score["format"] if score["used"] else rounded.get(score["gemm"])
            rows += tensors
        except (OSError, ValueError, pa.ArrowException) as error:
            raise RunError(
                f"{run.run_id} cannot be compared: segment {segment} is damaged: {describe(error)}"
            ) from None
    # Merged segments may hold them in another order. A rank numbers its tensors.
    for row in sorted(rows, key=_imported if run.config.get("kind") == IMPORT else _recorded):
        rank = row["rank"] or 0
        identity = (*(row[name] for name in IDENTITY[:-1]), row["dp_rank"] or 0)
        key = (*identity, seen[rank, identity])
        seen[rank, identity] += 1
        wholes.setdefault(key, _Whole(run, reads)).rows.append(row)
        places[rank] += 1
        # The first rank writes the rows that were reduced over ranks, but a row has the number another rank gave it.
        number = RECORDED.fullmatch(row["tensor_id"])
        place = int(number[1]) if number else places[rank]
        order[key] = min(order.get(key, place), place)
    return {key: wholes[key] for key in sorted(wholes, key=lambda key: (-1 if key[0] is None else key[0], order[key]))}


def _recorded(row: Row) -> tuple[Any, ...]:
    return len(row["tensor_id"]), row["tensor_id"]


def _imported(row: Row) -> tuple[Any, ...]:
    order = row[ORDER]
    names = [natural(text or "") for text in (row["path"], row["file_key"], row["tensor_id"])]
    return order is None, order or 0, *names


def _place(key: Key) -> str:
    iteration, batch, layer, module, expert, _, _, operation, phase, name, stage, replica, again = key
    parts = [
        f"iteration {iteration}" if iteration is not None else "",
        f"micro-batch {batch}" if batch is not None else "",
        f"replica {replica}" if replica else "",
        f"{name_of(layer, module, name, expert)} ({operation}, {phase})",
        f"{stage} quantization" if stage else "",
        f"call {again + 1}" if again else "",
    ]
    return ", ".join(filter(None, parts))


def _compared(key: Key, a: _Whole, key_b: Key, b: _Whole, imported: bool) -> TensorDifference:
    a.check()
    b.check()
    known = dict(zip(IDENTITY, key, strict=False))
    words = {
        name: known[name] for name in ("iteration", "micro_batch", "layer_index", "module", "operation", "tensor_name")
    }
    names = [name_of(identity[2], identity[3], identity[9]) for identity in (key, key_b)]
    other = f", in RUN_B {names[1]}" * (names[0] != names[1])
    words |= {"place": _place(key) + other, "shape": a.shape, "shape_b": b.shape}
    words |= {"dtype": str(a.rows[0]["dtype"]), "dtype_b": str(b.rows[0]["dtype"])}
    words |= {"tensor_id": a.tensor_id, "tensor_id_b": b.tensor_id}
    if a.logged != b.logged:
        raise IncompleteError("the runs do not have the same statistics of it")
    if a.shape != b.shape and not (imported and same_layout(a.shape, b.shape)):
        return TensorDifference(**words, by="shape", difference=math.inf, equal=False)
    if a.has_values and b.has_values:
        return TensorDifference(**words, by="values", **_of_values(a.values(), b.values()))
    return TensorDifference(**words, by="statistics", **_of_statistics(a.statistics(), b.statistics()))


def _of_values(a: Tensor, b: Tensor) -> dict[str, Any]:
    import torch

    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    square = error = largest = 0.0
    at, equal = 0, a.dtype == b.dtype
    for start in range(0, len(flat_a), CHUNK):
        x, y = flat_a[start : start + CHUNK].contiguous(), flat_b[start : start + CHUNK].contiguous()
        equal = equal and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        x, y = x.double(), y.double()
        apart = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, x - y).abs().nan_to_num(math.inf, math.inf)
        square += float(torch.where(x.isfinite(), x, 0.0).square().sum())
        error += float(apart.square().sum())
        most, where = apart.max(0)
        if float(most) > largest:
            largest, at = float(most), start + int(where)
    index = tuple(map(int, torch.unravel_index(torch.tensor(at), a.shape))) if largest and a.dim() else ()
    relative = math.sqrt(error / square) if square else math.inf if error else 0.0
    return {"difference": relative, "equal": equal, "largest": largest, "at": index if largest else None}


def _of_statistics(a: dict[str, float], b: dict[str, float]) -> dict[str, Any]:
    """Compare statistics. For tensors joined from parts, only statistics that do not depend on the order of addition
    decide `equal`."""
    exact = [
        name
        for name in a
        if name in b and (len(a) == len(b) == len((*MOMENTS, *COUNTS)) or name not in ("mean", "rms"))
    ]

    def change(name: str, unit: str) -> float:
        if _same(a[name], b[name]):
            return 0.0
        return abs(a[name] - b[name]) / a[unit] if a[unit] > 0 and math.isfinite(b[name] - a[name]) else math.inf

    units = {
        "rms": "rms",
        "mean": "absmax" if math.isnan(a["rms"]) else "rms",
        "absmax": "absmax",
        "min": "absmax",
        "max": "absmax",
    }
    relative = max(change(name, unit) for name, unit in units.items())
    if not all(_same(a[name], b[name]) for name in ("nans", "infs")):
        relative = math.inf
    return {"difference": relative, "equal": all(_same(a[name], b[name]) for name in exact)}


def _same(x: float, y: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _said(config: Mapping[str, Any], name: str) -> object:
    value = config.get(name)
    return "not set" if value in (None, "", []) else value


def _notes(a: RunInfo, b: RunInfo, in_parts: bool) -> Iterator[str]:
    """in_parts: whether the runs divide steps into other micro-batches, of which the hashes of their data are."""
    config_a, config_b = dict(a.config), dict(b.config)
    changed = [name for name in SETTINGS if _said(config_a, name) != _said(config_b, name)]
    if changed:
        listed = ", ".join(f"{name} ({_said(config_a, name)}, {_said(config_b, name)})" for name in changed)
        yield f"Settings that differ: {listed}."
    if in_parts:
        yield "Whether the runs read the same data is not known: hashes are of micro-batches."
    elif "dp" in config_a and config_a.get("dp") == config_b.get("dp"):  # the digest is of what a replica reads
        read = [{r["iteration"]: r.get("data_sha256") for r in read_steps(run.directory)} for run in (a, b)]
        differing = [step for step in sorted(read[0].keys() & read[1].keys()) if read[0][step] != read[1][step]]
        if differing:
            yield f"The runs read different data from iteration {differing[0]} on."
