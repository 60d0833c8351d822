"""Every field of the filter, every statistic of a tensor and every metric, once: title, unit, format, definition, SQL.

The filter, tooltips, columns of tables, titles of axes, headers of exports, the glossary and the reference read them
here. To add one, add an entry to `_FIELDS`. What a column means is said in data/run/columns.py. This file imports
neither torch nor pandas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from binade.data.run.columns import Score, TensorRow, Trace, columns_of
from binade.data.run.tensor_kinds import TENSOR_KINDS, Operation, Phase
from binade.data.words.text import number_text
from binade.quant.definitions import METRICS
from binade.quant.normal import VS_NORMAL


class FieldKind(StrEnum):
    """What a field describes."""

    IDENTITY = "identity"  # which tensor it is: a field of the filter, a column of the table tensor
    STATISTIC = "statistic"  # the values of one tensor, without any format
    ERROR = "error"  # a tensor rounded to a format: a column of the table score
    METRIC = "metric"  # any other quantity


class FilterGroup(StrEnum):
    """Where the filter lists a field."""

    FIRST = ""  # always visible
    RUN = "Run and model"
    RANK = "Micro-batch and rank"


@dataclass(frozen=True)
class Field:
    """A quantity or a property of tensors, and how its values are written.

    name        in Python, in SQL and in addresses
    title       for people: "Layer", "SQNR"
    unit        "%" for shares, whose values are from 0 to 1 and are shown multiplied by 100
    format      of its values, in the language of Python's `format`: "d" whole numbers, ".1f" one decimal, ".3g" three
                significant digits, with "+" in front to mark positive values; "" for text
    sql         an expression over the table `tensor` or, of an ERROR, `score`; "" if no single expression gives it
    group       of an IDENTITY
    low_is_bad  as for SQNR
    log         whether its axis is logarithmic
    resolution  two values that differ by less are called equal
    order       values of an IDENTITY that are listed first, as the model computes them
    """

    name: str
    title: str
    unit: str = ""
    definition: str = ""
    format: str = ".3g"
    sql: str = ""
    kind: FieldKind = FieldKind.METRIC
    group: FilterGroup = FilterGroup.FIRST
    low_is_bad: bool = False
    log: bool = False
    resolution: float = 0.0
    order: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return self.title

    @property
    def is_integer(self) -> bool:
        return self.format == "d"

    @property
    def factor(self) -> float:
        """What values are multiplied by when they are shown."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def axis(self) -> str:
        """The title of an axis or a column: with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def inline(self) -> str:
        """The title within a sentence: "layer", "SQNR"."""
        return self.title if self.title[1:2].isupper() else self.title[:1].lower() + self.title[1:]

    def ordered(self, values: Iterable[Any]) -> list[Any]:
        """Values in the order in which they are listed; those that `order` does not name as they come, at the end."""
        places = {value: at for at, value in enumerate(self.order)}
        return sorted(values, key=lambda value: places.get(value, len(places)))

    def with_sign(self, marked: bool = True) -> Field:
        """The same with or without a plus sign before positive values."""
        return replace(self, format="+" * marked + self.format.removeprefix("+"))

    def text(self, value: float | None) -> str:
        """A value as shown next to a bar or in a sentence, without the unit."""
        if value is None or math.isnan(value):
            return "no value"
        if math.isinf(value):
            return ("no error" if value > 0 else "overflows") if self.low_is_bad else "∞"
        text = number_text(value * self.factor, self.format)
        return ">99.9" if self.unit == "%" and text == "100" and value < 1 else text  # not all of it

    def quantity(self, value: float | None) -> str:
        """A value with its unit; a value that is not finite is described in words, without a unit."""
        finite = value is not None and math.isfinite(value)
        return self.with_unit(self.text(value)) if finite else self.text(value)

    def with_unit(self, text: str) -> str:
        return f"{text}{self.unit}" if self.unit == "%" else f"{text} {self.unit}".rstrip()


def _identity(
    name: str,
    title: str,
    format: str = "",
    group: FilterGroup = FilterGroup.FIRST,
    order: tuple[str, ...] = (),
) -> Field:
    return Field(name, title, "", MEANINGS[name], format, f"tensor.{name}", FieldKind.IDENTITY, group, order=order)


def _statistic(name: str, sql: str, title: str = "", definition: str = "", unit: str = "", log: bool = False) -> Field:
    """A statistic that quant computes has its title and definition there."""
    known = METRICS.get(name)
    title, unit, definition = (known.label, known.unit, known.definition) if known else (title, unit, definition)
    return Field(name, title, unit, definition, sql=sql, kind=FieldKind.STATISTIC, log=log)


def _decibels(name: str, title: str, definition: str, format: str = ".1f", kind: FieldKind = FieldKind.METRIC) -> Field:
    sql = f"score.{name}" if kind is FieldKind.ERROR else ""
    return Field(name, title, "dB", definition, format, sql, kind, low_is_bad=True, resolution=0.1)


def _error(name: str) -> Field:
    known = METRICS[name]
    return Field(name, known.label, known.unit, known.definition, sql=f"score.{name}", kind=FieldKind.ERROR)


MEANINGS = {column.name: column.meaning for rows in (Trace, Score, TensorRow) for column in columns_of(rows)}
MODULES = (  # in the order of the network
    *("q_down", "q", "q_up", "k", "v", "kv_down", "kv_up", "qkv", "core", "proj", "router", "fc1", "gate", "up", "fc2"),
    *("shared_fc1", "shared_fc2", "scalar_gate"),
)
_FIELDS = (
    # Fields of the filter, in the order of its menu.
    _identity("run_id", "Run"),
    _identity("iteration", "Iteration", "d"),
    _identity("layer_index", "Layer", "d"),
    _identity("module", "Module", order=MODULES),
    _identity("operation", "Operation", order=tuple(Operation)),
    _identity("phase", "Phase", order=tuple(Phase)),
    _identity("tensor_name", "Tensor", order=tuple(kind.name for kind in TENSOR_KINDS)),
    _identity("quant_type", "Quant type"),
    _identity("recipe", "Recipe", group=FilterGroup.RUN),
    _identity("model", "Model", group=FilterGroup.RUN),
    _identity("size", "Size", group=FilterGroup.RUN),
    _identity("dataset", "Dataset", group=FilterGroup.RUN),
    _identity("layer_type", "Layer type", group=FilterGroup.RUN),
    _identity("component", "Component", group=FilterGroup.RUN),
    _identity("stage", "Stage", group=FilterGroup.RUN),
    _identity("micro_batch", "Micro-batch", "d", FilterGroup.RANK),
    _identity("rank", "Rank", "d", FilterGroup.RANK),
    _identity("expert", "Expert", "d", FilterGroup.RANK),
    # Errors of a tensor in a format.
    _decibels("sqnr_db", METRICS["sqnr_db"].label, METRICS["sqnr_db"].definition, kind=FieldKind.ERROR),
    *map(_error, ("flush_to_zero", "saturated", "flushed_error_share", "saturated_error_share")),
    _decibels(VS_NORMAL, "SQNR against normal values", "SQNR minus that of values from N(0,1) in the same format: 0 "
              "where a tensor loses what normally distributed values lose", "+.1f"),
    # Statistics of a tensor's values.
    _statistic("absmax", "absmax", "absmax", MEANINGS["absmax"], log=True),
    _statistic("std", "std", "Standard deviation", MEANINGS["std"], log=True),
    _statistic("rms", "rms", "rms", MEANINGS["rms"], log=True),
    _statistic("kurtosis", "kurtosis"),
    _statistic("crest_factor", "absmax / nullif(rms, 0)"),
    _statistic("dynamic_range", "CASE WHEN absmax > 0 THEN log2(absmax / absmin) END"),
    _statistic("zero_share", "zeros / nullif(numel, 0)", "Zeros", "share of the elements that are exactly 0", "%"),
    _statistic("non_finite", "(nans + infs) / nullif(numel, 0)", "NaN and Inf",
               "share of the elements that are NaN or infinite", "%"),
    # Metrics that collections measure.
    Field("effect", "Measured loss change", "nats", "loss with both operands of the product rounded minus loss "
          "without, on the same weights and sequences, mean over sequences", "+.3g"),
    Field("parity_change", "Change of log-probabilities", "nats", "mean |Δ log-probability| of a text's tokens with "
          "the product rounded as for the rollout and all others as for training, mean over sequences", log=True),
    _decibels("result_sqnr_db", "SQNR of the result", MEANINGS["result_sqnr_db"]),
    _decibels("second_sqnr_db", "SQNR of the second rounding", MEANINGS["second_sqnr_db"]),
    Field("scale_spread", "Spread of block scales", "binades", "log₂ of the largest block scale over the smallest, "
          "without the lowest and highest 1% of the blocks", ".0f", resolution=1.0),
    Field("tensor_scale", "Tensor scale", "", MEANINGS["tensor_scale"], log=True),
    Field("outlier_persistence", "Persistence", "", "Jaccard index (channels in both sets over channels in either) of "
          "the hot channels in two successive recorded iterations: the 1% with the largest absmax, but at least 8, and "
          "at most 64 or a quarter of all channels, whichever is smaller", ".2f"),
    Field("hot_ratio", "Hottest channel", "", MEANINGS["hot_ratio"]),
    Field("oscillating", "Oscillating weights", "%", "share of the sampled weights with Σ|ΔQ(w)| / Σ|Δw| ≥ 16 over the "
          "last 50 recorded iterations"),
    Field("at_bin_edge", "Weights at a bin’s edge", "%", MEANINGS["at_bin_edge"]),
    Field("edge_excess", "Excess at a bin’s edge", "%", "share of the weights at a bin’s edge, minus the share of "
          "normally distributed values with the same standard deviation, dtype and format", "+.3g"),
    Field("gradient_to_noise", "Gradient to noise", "", "‖g‖ / ‖ĝ − g‖ = 10^(SQNR/20), where g is the gradient of a "
          "single micro-batch and ĝ the same with rounding; of M accumulated micro-batches it is up to √M times larger "
          "if their noise is independent", low_is_bad=True, log=True),
)  # fmt: skip
_LISTED = {field.name: field for field in _FIELDS}
_RESOLUTIONS = {"cosine": 0.001}
FIELDS: dict[str, Field] = _LISTED | {
    name: Field(name, known.label, known.unit, known.definition, resolution=_RESOLUTIONS.get(name, 0.0))
    for name, known in METRICS.items()
    if name not in _LISTED
}
"""Every field by name: those of the filter, the errors, the statistics, then the other metrics."""
IDENTITIES = {name: field for name, field in FIELDS.items() if field.kind is FieldKind.IDENTITY}
"""The fields of the filter, in the order of its menu."""
MEASURES = {name: field for name, field in FIELDS.items() if field.kind is not FieldKind.IDENTITY}
"""All that is measured."""
STATISTICS = {name: field.sql for name, field in FIELDS.items() if field.kind is FieldKind.STATISTIC}
"""The SQL of each statistic of a tensor's own values, over the table `tensor`."""
ERRORS = tuple(name for name, field in FIELDS.items() if field.kind is FieldKind.ERROR)
"""The errors of a tensor in a format that the app shows, columns of the table `score`."""
