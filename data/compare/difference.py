"""Two runs of the same model and data, tensor by tensor: from other machines, versions, backends or parallel layouts.

Tensors are matched by what they are, regardless of the rank or shard that has them. This module reads the runs' own
files, not an index, so the two runs may be in different roots. Runs of which one is imported are matched by place, see
data.matching, and a difference counts from what their dtypes explain.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from binade.data.compare.coverage import FormatDifference, differing, recorded_formats
from binade.data.compare.matching import Key, explained, matched, same_layout
from binade.data.compare.step_sums import by_step, factor_of_sums
from binade.data.index.cache import Done
from binade.data.index.whole_tensors import IDENTITY, IncompleteError, Row, WholeTensor
from binade.data.run.columns import COUNTS, MOMENTS
from binade.data.run.directory import IMPORT, RunError, RunInfo
from binade.data.run.losses import read_losses
from binade.data.run.segment import read_tables
from binade.data.run.store import TensorFileError
from binade.data.words.names import name_of
from binade.data.words.text import describe, natural

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
        ours, theirs, parts = by_step(ours, theirs)
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
        (*_notes(a, b, bool(parts)), *parts, *factor_of_sums(ours, theirs, pairs)),
        formats,
        all(unordered),
        tolerance,
    )


def _only(tensors: dict[Key, WholeTensor], run: RunInfo, only: Collection[str] | None) -> dict[Key, WholeTensor]:
    if only is None:
        return tensors
    return {
        key: whole
        for key, whole in tensors.items()
        if any(f"{run.run_id}/{row['tensor_id']}" in only for row in whole.every_row)
    }


def _unordered(tensors: Mapping[Key, WholeTensor], keys: Collection[Key]) -> bool:
    """Whether the order of execution is not known of all of these tensors of an import."""
    return any(row[ORDER] is None for key in keys for row in tensors[key].rows)


def _formats(
    ours: Mapping[Key, WholeTensor], theirs: Mapping[Key, WholeTensor], of_ours: bool
) -> tuple[FormatDifference, ...]:
    """of_ours: of the operands of the first run alone."""
    both = {key[0] for key in ours} & {key[0] for key in theirs}
    a, b = (
        recorded_formats(row for key, whole in run.items() if key[0] in both for row in whole.rows)
        for run in (ours, theirs)
    )
    return differing(a, {operand: fmt for operand, fmt in b.items() if operand in a or not of_ours})


def _tensors(run: RunInfo, reads: Callable[[str], None]) -> dict[Key, WholeTensor]:
    """A run's tensors in the order of execution. A key ends with how often the rank had recorded that identity
    before."""
    wholes: dict[Key, WholeTensor] = {}
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
        wholes.setdefault(key, WholeTensor(run, reads)).rows.append(row)
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


def _compared(key: Key, a: WholeTensor, key_b: Key, b: WholeTensor, imported: bool) -> TensorDifference:
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
        read = [{r["iteration"]: r.get("data_sha256") for r in read_losses(run.directory)} for run in (a, b)]
        differing = [step for step in sorted(read[0].keys() & read[1].keys()) if read[0][step] != read[1][step]]
        if differing:
            yield f"The runs read different data from iteration {differing[0]} on."
