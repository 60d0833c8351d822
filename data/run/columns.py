"""The rows that are recorded of a tensor, and with them every column, each declared once.

A field of a `row` is a column if it is declared with `column`, and has further columns if it is declared with `part`.
From these declarations follow the Arrow schema of a segment's file and what is written to it (data/run/segment.py),
the tables of the index (data/index/tables.py) and their description in docs/reference.md. To add a column, add a field
with `optional=True`, so that it is null in the segments of earlier versions, and compute it where the row is made.
This file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import numpy as np

from binade.quant.definitions import METRICS
from binade.quant.measurements import Errors, Summary

if TYPE_CHECKING:  # it imports torch
    from binade.quant.block_histograms import Histogram

T = TypeVar("T")


class ColumnType(StrEnum):
    """The type of a column, as DuckDB names it."""

    TEXT = "VARCHAR"
    TRUTH = "BOOLEAN"
    SMALL = "SMALLINT"
    INTEGER = "INTEGER"
    LONG = "BIGINT"
    REAL = "DOUBLE"
    TIME = "TIMESTAMP"
    INTEGERS = "INTEGER[]"
    LONGS = "BIGINT[]"
    SINGLES = "FLOAT[]"
    REALS = "DOUBLE[]"


TEXT, TRUTH, SMALL, INTEGER, LONG, REAL, TIME, INTEGERS, LONGS, SINGLES, REALS = ColumnType


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    attribute   of a part of a row: which of its attributes has the value
    optional    whether segments of earlier versions lack it: it is null there
    constraint  in SQL
    """

    name: str
    type: ColumnType
    meaning: str = ""
    attribute: str = ""
    optional: bool = False
    constraint: str = ""


def column(
    type: ColumnType,
    meaning: str = "",
    *,
    default: Any = MISSING,
    name: str = "",
    optional: bool = False,
    constraint: str = "",
) -> Any:
    """A field of a row that is a column. name: of the column, if it is not the field's; others: see TableColumn."""
    declared = TableColumn(name, type, meaning, optional=optional, constraint=constraint)
    return field(default=default, metadata={"column": declared})


def part(columns: type | Sequence[TableColumn], *, default: Any = MISSING) -> Any:
    """A field of a row whose value has these columns, or those of this class. They are null if it is None."""
    if isinstance(columns, type):
        attributes = _columns_by_field(columns).items()
        columns = [replace(each, attribute=name) for name, ones in attributes for each in ones]
    return field(default=default, metadata={"part": tuple(columns)})


@dataclass_transform(frozen_default=True, field_specifiers=(column, part, field))
def row(declared: type[T]) -> type[T]:
    """Decorates a class of rows, or of parts of rows: a frozen dataclass whose fields may be columns and parts."""
    return dataclass(frozen=True)(declared)


def columns_of(rows: type) -> tuple[TableColumn, ...]:
    """The columns of a class of rows, those of its parts included, in the order of its fields."""
    return tuple(each for columns in _columns_by_field(rows).values() for each in columns)


def values_of(given: TensorRow | LoggedRow | Score | Trace) -> dict[str, Any]:
    """The value of each column of a row."""
    values: dict[str, Any] = {}
    rows: Any = type(given)  # mypy does not take the class of a value for hashable
    for name, columns in _columns_by_field(rows).items():
        value = getattr(given, name)
        for each in columns:
            if not each.attribute:
                values[each.name] = value
            else:
                values[each.name] = None if value is None else getattr(value, each.attribute)
    return values


@cache
def _columns_by_field(rows: type) -> dict[str, tuple[TableColumn, ...]]:
    found: dict[str, tuple[TableColumn, ...]] = {}
    for declared in fields(rows):
        if one := declared.metadata.get("column"):
            found[declared.name] = (replace(one, name=one.name or declared.name),)
        elif of_part := declared.metadata.get("part"):
            found[declared.name] = of_part
    return found


def _numbers(measured: type, meanings: Mapping[str, str]) -> tuple[TableColumn, ...]:
    """A column for each number in a class of quant/measurements.py."""
    types: dict[Any, ColumnType] = {float: REAL, int: LONG}
    numbers = [number for number in fields(measured) if number.type in types]
    return tuple(
        TableColumn(
            number.name,
            types[number.type],
            number.metadata.get("meaning") or meanings.get(number.name, ""),
            number.name,
        )
        for number in numbers
    )


STATISTICS = _numbers(Summary, {})
ERRORS = _numbers(Errors, {name: metric.definition for name, metric in METRICS.items()})
MOMENTS = tuple(each.name for each in STATISTICS if each.type is REAL)
COUNTS = tuple(each.name for each in STATISTICS if each.type is LONG and each.name != "numel")
ERROR_COLUMNS = tuple(each.name for each in ERRORS)


@row
class Identity:
    """The identity of a tensor: the values that users filter by. None if one does not apply or is unknown."""

    model: str | None = column(TEXT, "The model that was trained.")
    size: str | None = column(TEXT, "tiny: for a CPU. full: the published size.")
    dataset: str | None = column(TEXT, "The text that the model was trained on.")
    recipe: str | None = column(TEXT, "Which operand of which GEMM is rounded to which format during a run.")
    quant_type: str | None = column(TEXT, "The format or recipe that was requested where the tensor was recorded.")
    layer_type: str | None = column(
        TEXT, "attention, linear, or product for a declared product; none outside the GEMMs."
    )
    layer_index: int | None = column(INTEGER, "The layer of the model, numbered from 1.")
    module: str | None = column(
        TEXT,
        "The part of a layer: qkv, proj, fc1, fc2, router, or core for the attention core; q, q_down, q_up, kv_down "
        "and kv_up of MLA; shared_fc1 and shared_fc2 of shared experts; or a name from the path of the module.",
    )
    component: str | None = column(TEXT, "FA: the attention core. linear: a linear layer. None outside the GEMMs.")
    operation: str | None = column(
        TEXT,
        "The pass in which a tensor is computed or used: forward, backward, evaluation (a forward pass that does not "
        "train) or optimizer.",
    )
    phase: str | None = column(TEXT, "pre: input of the operation. post: its output.")
    tensor_name: str | None = column(TEXT, "What the tensor is in its operation, such as input, weight or grad_output.")
    iteration: int | None = column(
        LONG, "A step of the optimizer, numbered from 0. Warm-up iterations have negative numbers."
    )
    micro_batch: int | None = column(
        INTEGER, "The part of a batch that goes through the model at once, numbered from 0."
    )
    rank: int | None = column(INTEGER, "The process that recorded the tensor, numbered from 0.")
    expert: int | None = column(INTEGER, "The expert of a mixture of experts, numbered from 0.", default=None)


@row
class Shard:
    """Which part of a tensor-parallel tensor this is: number `index` of `count`.

    kind    whole: every rank has the whole tensor; slice: the ranks' tensors concatenated along `axis` are the whole;
            partial: their sum is the whole
    """

    index: int = column(INTEGER, "number of the tensor-parallel rank, 0 to tp_size - 1", name="tp_rank", default=0)
    count: int = column(INTEGER, name="tp_size", default=1)
    kind: str = column(
        TEXT,
        "how to restore the unsharded tensor: whole, slice (join along shard_axis), partial (sum)",
        name="shard",
        default="whole",
    )
    axis: int | None = column(
        INTEGER, "from the end if negative; null unless shard is slice", name="shard_axis", default=None
    )
    stride: int = column(
        INTEGER,
        "number of tensors along the axis, each sharded separately: 2 for gate and up",
        name="shard_stride",
        default=1,
    )
    replica: int = column(INTEGER, "number of the data-parallel replica", name="dp_rank", default=0)


@row
class Origin:
    """What is known about an imported tensor in addition to its Identity."""

    source_version: str | None = column(
        TEXT,
        "for an imported tensor: the tool that logged it; for the Megatron fork, the naming of its file, V0 to V7",
        default=None,
    )
    original_quant_type: str | None = column(
        TEXT, "for an imported tensor: the quant type as spelled in its log", default=None
    )
    stage: str | None = column(
        TEXT, "Whether an imported tensor was taken before or after quantization: before, after.", default=None
    )
    corrections: str | None = column(
        TEXT, "one sentence per line: which entries of the log were corrected, and why", default=None
    )
    file_key: str | None = column(TEXT, "the tensor's key in a file that contains several", default=None)
    module_path: str | None = column(
        TEXT, "for an imported tensor: the path of its module in the model, if its tool names it", default=None
    )
    execution_order: int | None = column(
        LONG,
        "for an imported tensor: its place in the order in which its iteration was executed on its rank; null if not "
        "known",
        default=None,
    )
    file_size: int | None = column(LONG, "for an imported tensor: bytes of its file when it was imported", default=None)
    file_time_ns: int | None = column(
        LONG, "for an imported tensor: when its file had last changed, in nanoseconds since 1970", default=None
    )


@row
class RoundedWith:
    """What the rounding of an operand followed from besides its values and its spec, so that it can be repeated."""

    tensor_scale: float | None = column(
        REAL,
        "what all values were multiplied by before a GEMM rounded them, where one number scales the whole tensor",
        default=None,
    )
    noise_seed: int | None = column(LONG, "of stochastic rounding; null without it", default=None)
    sign_seed: int | None = column(LONG, "of the random signs of a rotation; null without them", default=None)


@row
class Score:
    """The error of rounding a tensor to a format, along the axis that one GEMM contracts.

    second_sqnr_db
                 None where the operand was rounded once, and in a row that ranks merged
    rounded_with of a used format; in others nothing is set
    error        of both roundings, where the GEMM rounded the rounded forward value
    blocks       see quant.block_histograms; empty where they were not measured
    """

    _: KW_ONLY
    format: str = column(TEXT)
    gemm: str | None = column(TEXT, "forward, dgrad, wgrad; null if not known", default=None)
    used: bool = column(TRUTH, "whether that GEMM used the tensor in this format", default=False)
    second_sqnr_db: float | None = column(
        REAL,
        "of an operand that a GEMM rounds from its rounded forward value: 10·log₁₀(Σy² / Σ(q−y)²), y that value. Its "
        "SQNR is that of both roundings",
        default=None,
        optional=True,
    )
    rounded_with: RoundedWith = part(RoundedWith, default=RoundedWith())
    error: Errors = part(ERRORS)
    blocks: Mapping[str, Histogram] = field(default_factory=dict)


@row
class Trace:
    """Values for following a tensor over iterations: see quant.traces."""

    hot_channels: np.ndarray = column(
        INTEGERS, "the channels (indices of the last axis) with the largest absmax, hottest first"
    )
    hot_ratio: float = column(REAL, "the largest absmax of a channel divided by the median one")
    sampled: np.ndarray | None = column(SINGLES, "for a rounded weight: values at fixed positions", default=None)
    sampled_rounded: np.ndarray | None = column(SINGLES, "the same values after rounding", default=None)
    at_bin_edge: float | None = column(
        REAL,
        "share of the sampled weights (up to 8,192 per tensor) with |w − q| > 0.495 times the width of q’s bin; "
        "clipped weights are not at an edge",
        default=None,
    )


@row
class TensorRow:
    """Everything that is recorded of one tensor.

    error, rounded_with  of a quantized operand
    scores    of every GEMM that takes the tensor
    shard     None if the log of an imported tensor does not say
    origin    of an imported tensor
    last_bin  of a norm's gain, by MX format the share of its values that round to the largest code of their block; not
              written
    """

    _: KW_ONLY
    tensor_id: str = column(TEXT, "unique; checked during indexing", constraint="NOT NULL")
    run_id: str = column(TEXT, "One execution of training, or one import of tensors.")
    identity: Identity = part(Identity)
    captured: datetime | None = column(
        TIME, "for an imported tensor: the time in its log, whose time zone is unknown", default=None
    )
    shape: tuple[int, ...] = column(LONGS)
    dtype: str = column(TEXT)
    nbytes: int = column(LONG, "numel times the dtype's size")
    path: str | None = column(
        TEXT,
        "tensor file: relative to the run's directory, for an imported tensor absolute; null if not kept",
        default=None,
    )
    sha256: str | None = column(TEXT, "of the tensor file; for an imported tensor: when it was imported", default=None)
    contracted_axis: int | None = column(
        INTEGER,
        "for an operand: the axis that its GEMM contracts, from the end (-1 is the last); else null",
        default=None,
    )
    summary: Summary = part(STATISTICS)
    shard: Shard | None = part(Shard, default=Shard())
    recomputed: bool | None = column(
        TRUTH, "its layer's forward pass ran again during the backward pass; null if not known", default=None
    )
    tokens_left_out: int | None = column(
        INTEGER, "padding, which statistics, sketch and errors leave out; null without a mask", default=None
    )
    pairs_left_out: int | None = column(
        LONG,
        "pairs of query and key that the softmax does not see, which statistics, sketch and errors leave out; null "
        "without a mask",
        default=None,
        optional=True,
    )
    origin: Origin | None = part(Origin, default=None)
    gemm: str | None = column(
        TEXT,
        "forward, dgrad, wgrad: the GEMM that contracted_axis and format refer to, or whose result it is",
        default=None,
    )
    result_sqnr_db: float | None = column(
        REAL,
        "10·log₁₀(‖AB‖² / ‖Q(A)Q(B) − AB‖²) of a GEMM, both products in the tensors’ dtype",
        default=None,
    )
    format: str | None = column(
        TEXT,
        "the exact format this operand was rounded to; null for results and bf16, as are the errors in the last "
        "columns",
        default=None,
    )
    rounded_with: RoundedWith = part(RoundedWith, default=RoundedWith())
    error: Errors | None = part(ERRORS, default=None)
    scores: Sequence[Score] = ()
    trace: Trace | None = None
    last_bin: Mapping[str, float] = field(default_factory=dict)


@row
class LoggedRow:
    """A tensor of which another tool has logged statistics, but no values. columns: the others of a TensorRow that are
    known."""

    tensor_id: str = column(TEXT)
    run_id: str = column(TEXT)
    identity: Identity = part(Identity)
    origin: Origin = part(Origin)
    columns: Mapping[str, Any]


SKETCH_COLUMNS = (TableColumn("bin", SMALL), TableColumn("count", LONG))
BLOCK_COLUMNS = (
    TableColumn("format", TEXT),
    TableColumn("measure", TEXT, "scale_exponent, sqnr_db, crest_db"),
    TableColumn("bin", SMALL),
    TableColumn("count", LONG, "how many blocks"),
)
