"""The page of one tensor. Its views are the questions whose page is "tensor"."""

from __future__ import annotations

from typing import Any

import pandas as pd

from binade.app.figure import Drawn
from binade.app.formatting import first_formats
from binade.app.params import One, Param, known_tensor
from binade.app.questions.ranking import compute as ranking
from binade.app.questions.registry import params_of, views_of
from binade.app.questions.shared.labels import full_labels
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.scope import scoped
from binade.app.questions.shared.selection import SelectedTensor, Selection, formats_first
from binade.data.catalog import Catalog, CatalogError
from binade.data.filter import Filter
from binade.data.store import TensorFileError
from binade.quant.specs import Spec

VIEWS = views_of("tensor")
MAX_LISTED = 5000


def params(opened: Catalog) -> dict[str, Param]:
    return {
        "tensor": known_tensor(opened),
        "view": One(tuple(VIEWS)),
        "format": One(formats_first(first_formats(opened))),
        **params_of(VIEWS, opened),
    }


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened, where = selection.opened, selection.where
    if not opened.totals(where).tensors:
        return Drawn(problems=(f"No tensor matches: {where.sentence()}.",))
    tensor_id = in_filter(opened, where, values["tensor"], values["format"])
    if values["tensor"] not in (None, tensor_id):
        return Drawn(problems=(f"The tensor {values['tensor']} does not match the filter: {where.sentence()}.",))
    rows, labels = listed(opened, where, tensor_id)
    try:
        x = opened.load(tensor_id)
    except (CatalogError, TensorFileError) as error:
        return Drawn(problems=(f"The values of the tensor cannot be read: {error}.",))
    row = rows[rows["tensor_id"] == tensor_id].iloc[0]
    selected = SelectedTensor(opened, where, row=row, x=x, spec=Spec.of(values["format"]), labels=labels)
    return VIEWS[values["view"]].draw(selected, values)


def listed(opened: Catalog, where: Filter, tensor_id: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """The filter's tensors, as many as can be listed, with the selected one; and the label of each, by its ID."""
    rows = opened.tensors(where, limit=MAX_LISTED)
    if tensor_id not in set(rows["tensor_id"]):
        rows = pd.concat([opened.rows_of([tensor_id]), rows], ignore_index=True)
    names = given_names(opened)
    key = "labels", where, tuple(names.items()), tensor_id if len(rows) > MAX_LISTED else ""
    return rows, opened.kept(key, lambda: full_labels(rows, names))


def in_filter(opened: Catalog, where: Filter, wanted: str | None, fmt: str) -> str:
    """The requested tensor if the filter selects it; else the worst one of the filter, or the first if none is scored.
    The filter must select at least one."""
    if wanted and not opened.moments(where, "tensor_id", [wanted]).empty:
        return wanted
    scored = opened.scored_formats(where)
    if scored:
        where = scoped(opened, where, scored=True)
        table = ranking.ranking(opened, where, fmt if fmt in scored else scored[0], "sqnr_db")
        if not table.empty:
            return str(table.iloc[0]["tensor_id"])
    return str(opened.tensors(where, limit=1).iloc[0]["tensor_id"])
