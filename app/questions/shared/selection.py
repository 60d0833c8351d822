"""The selection of a page, from which a question draws its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pandas as pd
from torch import Tensor

from binade.app.figure import Drawn, source
from binade.app.questions.shared import boards
from binade.app.questions.shared.rounded import Recorded, Subject, applied, subject
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.scope import scope_of, scoped
from binade.data.catalog import USED, Catalog, CatalogError
from binade.data.filter import Filter
from binade.data.names import distinct_names, short_names
from binade.data.store import TensorFileError
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
    """One tensor: its row in the index, its values, and the spec that it is rounded to."""

    row: pd.Series
    x: Tensor
    spec: Spec

    @property
    def label(self) -> str:
        return self.labels[self.row["tensor_id"]]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the tensors that can be selected, by id; this one is among them."""
        return listed(self.opened, self.where, self.row["tensor_id"])

    @property
    def dim(self) -> int:
        """The axis that its GEMM contracts; the last axis of a result, which no GEMM contracts."""
        axis = self.row["contracted_axis"]
        return -1 if pd.isna(axis) else int(axis)

    @property
    def shape(self) -> str:
        return " × ".join(f"{n:,}" for n in self.x.shape) or "scalar"

    def source(self, note: str = "exact") -> str:
        """The first line of a caption."""
        return source(None, f"{self.label}, {self.shape}, {self.row['dtype']}, {self.row['tensor_id']} ({note})")

    @property
    def recorded(self) -> Recorded:
        return Recorded.of(self.row)

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
    return SelectedTensor(opened, where, row=row, x=x, spec=applied(spec, row))


def format_used(opened: Catalog, tensor_id: str | None) -> str:
    """The format that its GEMM rounded a tensor to; "" if it did not round it."""
    rows = opened.rows_of([tensor_id] if tensor_id else [])
    return "" if rows.empty or pd.isna(rows["format"].iloc[0]) else str(rows["format"].iloc[0])


def lowest(opened: Catalog, where: Filter, fmt: str) -> str | None:
    """The worst tensor of the place with the lowest SQNR in a format, or in the first that any is scored in; the first
    tensor of the filter if none is scored, None if there is none."""
    scored = opened.scored_formats(where)
    if scored:
        within = scoped(opened, where, scored=True)
        table = opened.errors(fmt if fmt in (*scored, USED) else scored[0], boards.PLACE, within)
        if not table.empty:
            named = table.assign(place=short_names(table)).sort_values(["sqnr_db", "place"])
            return str(named.iloc[0]["tensor_id"])
    first = opened.tensors(where, limit=1)
    return None if first.empty else str(first.iloc[0]["tensor_id"])


def listed(opened: Catalog, where: Filter, tensor_id: str) -> dict[str, str]:
    """The label of each tensor of the filter, by its id, if they are not too many; the selected one is among them."""
    names = given_names(opened)

    def labels(other: str = "") -> dict[str, str]:
        rows = opened.tensors(where, limit=MOST_LISTED)
        if other:
            rows = pd.concat([opened.rows_of([other]), rows], ignore_index=True)
        return distinct_names(rows, names, long=True)

    key = "labels", where, tuple(names.items())
    found = opened.kept(key, labels)
    return found if tensor_id in found else opened.kept((*key, tensor_id), lambda: labels(tensor_id))
