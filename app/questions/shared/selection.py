"""The selection of a page, from which a question draws its answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import pandas as pd
from torch import Tensor

from binade.app.draw.figure import Drawn, source
from binade.app.questions.shared.axes import Axes, axes_of
from binade.app.questions.shared.operands import along, gemms_of, operand, ranked_tensors, role_of, scores_in
from binade.app.questions.shared.rounded import FLASH, NOT_RECORDED, Recorded, Subject, applied, subject
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.scope import scope_of, scoped
from binade.data.index.catalog import USED, Catalog, CatalogError
from binade.data.run.store import TensorFileError
from binade.data.run.tensor_kinds import Gemm
from binade.data.words.filter import Filter
from binade.data.words.names import distinct_names
from binade.quant.specs import Spec

MOST_LISTED = 5000  # tensors to choose from
UNSCORED = "mxfp4"  # the format that a tensor is rounded to where none is chosen and nothing is scored


class Of(StrEnum):
    """What a question is asked of: the first argument of its `draw`."""

    SELECTION = "selection"  # the filter's tensors: a Selection
    BOARD = "board"  # the filter's tensors in a format: a Board
    TENSOR = "tensor"  # one tensor: a SelectedTensor


@dataclass(frozen=True)
class Selection:
    """A catalog and a filter."""

    opened: Catalog
    where: Filter


@dataclass(frozen=True, kw_only=True)
class Board(Selection):
    """The filter's tensors, and the format that they are shown in; "" where nothing is scored."""

    format: str

    @property
    def scope(self) -> str:
        """Its run and iteration."""
        return scope_of(self.opened, self.where)


@dataclass(frozen=True, kw_only=True)
class SelectedTensor(Selection):
    """One tensor as the operand, or the result, of a GEMM.

    row       in the index
    x         its values; as the operand of a linear layer's other GEMM, all tokens in the first axis
    spec      that it is rounded to
    gemm      that takes or computes it; "" if none is known
    dim       the axis that this GEMM contracts; the last axis of a result, which no GEMM contracts
    recorded  how this GEMM rounded it, and the SQNR that this gave
    """

    row: pd.Series
    x: Tensor
    spec: Spec
    gemm: str = ""
    dim: int = -1
    recorded: Recorded = NOT_RECORDED
    recorded_sqnr_db: float = math.nan

    @property
    def label(self) -> str:
        return self.labels[self.row["tensor_id"]]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the tensors that can be selected, by id; this one is among them."""
        return listed(self.opened, self.where, self.row["tensor_id"])

    @cached_property
    def axes(self) -> Axes:
        return axes_of(self.opened, self.row)

    @property
    def all_values(self) -> str:
        """What its values are called where they are counted: unlike the statistics in its row, with masked pairs."""
        left_out = self.row.get("pairs_left_out")
        return "all pairs, masked ones included" if pd.notna(left_out) and left_out else "the values"

    @property
    def shape(self) -> str:
        return " × ".join(f"{n:,}" for n in self.x.shape) or "scalar"

    def source(self, note: str = "exact") -> str:
        """The first line of a caption."""
        role = f", {role_of(self.row)} of {self.gemm}" if self.gemm else ""
        what = f"{self.label}{role}, {self.shape}, {self.row['dtype']}, {self.row['tensor_id']}"
        return source(None, f"{what} ({note})")

    @property
    def problem(self) -> str:
        """Why the values cannot be rounded to `spec` as a GEMM did or would, or ""."""
        return self.recorded.problem(self.spec)

    def rounded(self, spec: Spec | None = None) -> Subject:
        """The values, or a sample of them, rounded to a spec; default: `spec`. In the recorded format, as recorded."""
        return subject(self.x, spec or self.spec, self.dim, recorded=self.recorded)


def select(of: Of, opened: Catalog, where: Filter, values: Mapping[str, Any]) -> Selection | Drawn:
    """What a question is asked of, for these values of the scope; the answer itself if that does not exist."""
    if of is Of.BOARD:
        return Board(opened, where, format=values["format"] or "")
    return _tensor(opened, where, values) if of is Of.TENSOR else Selection(opened, where)


def _tensor(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> SelectedTensor | Drawn:
    if not opened.totals(where).tensors:
        return Drawn(problems=(f"No tensor matches: {where.sentence()}.",))
    spec, tensor_id = Spec.of(values["format"] or UNSCORED), values["tensor"]
    if opened.moments(where, "tensor_id", [tensor_id]).empty:
        return Drawn(problems=(f"The tensor {tensor_id} does not match the filter: {where.sentence()}.",))
    try:
        x = opened.load(tensor_id)
    except CatalogError:
        text = "The values of this tensor were not kept. Its distribution can be drawn from its sketch, on Compare."
        if opened.distribution(tensor_ids=[tensor_id]).empty:
            text = "This tensor has no values and no sketch, only statistics, so there is no distribution to draw."
        return Drawn(problems=(text,))
    except TensorFileError as error:
        return Drawn(problems=(f"The values of the tensor cannot be read: {error}.",))
    row = opened.rows_of([tensor_id]).iloc[0]
    gemm, known = values.get("gemm") or "", gemms_of(opened, row)
    if gemm and gemm not in known:
        role = role_of(row)
        of = f"{'an' if role == 'operand' else 'a'} {role} of {' and '.join(known)}" if known else "no operand"
        return Drawn(problems=(f"{tensor_id} is {of}, and not of {gemm}: choose another GEMM.",))
    gemm = gemm or next(iter(known), "")
    part, dim = along(x, row, gemm)
    used, spec = _used(opened, row, gemm), applied(spec, row)
    recorded = recorded_of(opened, row, gemm, used)
    return SelectedTensor(
        opened, where, row=row, x=part, spec=spec, gemm=gemm, dim=recorded.along(spec, dim), recorded=recorded,
        recorded_sqnr_db=math.nan if used is None else float(used["sqnr_db"]),
    )  # fmt: skip


def recorded_in(opened: Catalog, row: pd.Series, gemm: str) -> Recorded:
    """How a GEMM rounded a tensor."""
    return recorded_of(opened, row, gemm, _used(opened, row, gemm))


def recorded_of(opened: Catalog, row: pd.Series, gemm: str, used: pd.Series | None) -> Recorded:
    """The same, from the row or the score that has it. A GEMM that took what the forward GEMM had rounded has an error
    of a second rounding. It is infinite if that changed nothing: the operand is that of the forward GEMM."""
    if row["tensor_name"] == "attention_probs" and gemm == Gemm.WGRAD and _is_flash(opened, row):
        return replace(NOT_RECORDED, other_values=FLASH)
    second = math.nan if used is None else used.get("second_sqnr_db", math.nan)
    if used is None or pd.isna(second):
        return NOT_RECORDED if used is None else Recorded.of(used)
    axis = -1 if pd.isna(row["contracted_axis"]) else int(row["contracted_axis"])
    if second == math.inf and used["format"] == row["format"]:
        return Recorded.of(row, axis)
    return Recorded.of(used, first=Recorded.of(row, axis))


def _is_flash(opened: Catalog, row: pd.Series) -> bool:
    """Whether the recipe of a tensor's run has softmax=flash, by its lines."""
    config = json.loads(opened.runs().set_index("run_id")["config"].get(row["run_id"], "{}"))
    return any("pv.softmax" in line for line in config.get("operands") or ())


def _used(opened: Catalog, row: pd.Series, gemm: str) -> pd.Series | None:
    """The rounding of a tensor in a GEMM: of its own it is in its row, of the other in a score that was used."""
    if pd.isna(row["gemm"]) or gemm == row["gemm"]:
        return row
    scored = scores_in(opened, str(row["tensor_id"]), gemm)
    used = scored[scored["used"]]
    return None if used.empty else used.iloc[0]


def format_used(opened: Catalog, tensor_id: str | None, gemm: str = "") -> str:
    """The format that a GEMM, by default its own, rounded a tensor to; "" if it did not round it."""
    rows = opened.rows_of([tensor_id] if tensor_id else [])
    return "" if rows.empty else recorded_in(opened, rows.iloc[0], gemm or rows.iloc[0]["gemm"]).format or ""


def worst(opened: Catalog, where: Filter, fmt: str) -> tuple[str | None, str | None]:
    """(the tensor that comes first in Explore, the GEMM in which it loses most): that with the lowest SQNR against
    normal values in a format, or in the first that any is scored in; if none is scored, the first tensor of the filter
    and None. None if there is no tensor."""
    scored = opened.scored_formats(where)
    within = scoped(opened, where, scored=True) if scored else where
    chosen = fmt if fmt in (*scored, USED) else next(iter(scored), "")
    first = ranked_tensors(opened, within, chosen, most=1)
    if first.empty:
        return None, None
    shown = operand(str(first.iloc[0]["tensor_id"]), first.iloc[0]["gemm"])
    return shown["tensor"], shown["gemm"]


def listed(opened: Catalog, where: Filter, tensor_id: str) -> dict[str, str]:
    """The label of each tensor of the filter, by its id, if they are not too many; the selected one is among them."""
    names = given_names(opened)

    def labels(other: str = "") -> dict[str, str]:
        rows = opened.tensors(where, limit=MOST_LISTED)
        if other:
            rows = pd.concat([opened.rows_of([other]), rows], ignore_index=True)
        return distinct_names(rows, names, long=True)

    key = "labels", where, tuple(names.items())
    titles = opened.kept(key, labels)
    return titles if tensor_id in titles else opened.kept((*key, tensor_id), lambda: labels(tensor_id))
