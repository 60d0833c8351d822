"""One tensor: why it suffers, what would fix it, whether it is normal or has drifted, its blocks, heads and codes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from binade.app.figure import Drawn
from binade.app.formatting import first_formats
from binade.app.params import Known, Many, One, Param, Whole
from binade.app.questions.attention import question as attention
from binade.app.questions.blocks import question as blocks
from binade.app.questions.codes import question as codes
from binade.app.questions.drift import question as drift
from binade.app.questions.normality import question as normality
from binade.app.questions.ranking import compute as ranking_compute
from binade.app.questions.shared.labels import full_labels
from binade.app.questions.shared.selected_tensor import Look, formats_first
from binade.app.questions.what_if import question as what_if
from binade.app.questions.why import question as why
from binade.data.catalog import Catalog, CatalogError
from binade.data.filter import Filter
from binade.data.store import TensorFileError
from binade.quant.formats import FORMATS

VIEWS = {
    "why": "Why",
    "whatif": "What if",
    "law": "Is it normal",
    "drift": "Rounding or drift",
    "blocks": "Blocks",
    "attention": "Attention",
    "codes": "Codes",
}
MAX_LISTED = 5000
DRAW = {
    "why": why.drawn,
    "whatif": what_if.drawn,
    "law": normality.drawn,
    "drift": drift.drawn,
    "blocks": blocks.drawn,
    "attention": attention.drawn,
    "codes": codes.drawn,
}


def params(opened: Catalog) -> dict[str, Param]:
    formats = first_formats(opened)
    return {
        "tensor": Known(lambda name: not opened.rows_of([name]).empty),
        "view": One(tuple(VIEWS)),
        "format": One(formats_first(formats[0] if formats else "mxfp4")),
        "law": One(normality.AGAINST),
        "other": Known(lambda name: not opened.rows_of([name]).empty),
        "formats": Many(tuple(FORMATS), what_if.DEFAULT),
        "over": One(what_if.OVER),
        "against": Known(lambda name: name in set(opened.runs()["run_id"])),
        "block_metric": One(tuple(blocks.METRIC_TITLES)),
        "block": Whole(0, 10**9),
        "map": One(tuple(attention.NAMES)),
        "head": Whole(1, 10**6, 1),
        "sequence": Whole(1, 10**6, 1),
        **{name: One(allowed) for name, allowed in what_if.CHOICES.items()},
    }


def drawn(opened: Catalog, where: Filter, values: dict[str, Any], tensors: list[str]) -> Drawn:
    if not opened.totals(where).tensors:
        return Drawn(problems=(f"No tensor matches: {where.sentence()}.",))
    tensor_id = in_filter(opened, where, values["tensor"], values["format"])
    if values["tensor"] not in (None, tensor_id):
        return Drawn(problems=(f"The tensor {values['tensor']} is not among: {where.sentence()}.",))
    rows = listed(opened, where, tensor_id)
    try:
        x = opened.load(tensor_id)
    except (CatalogError, TensorFileError) as error:
        return Drawn(problems=(f"The values of the tensor are not to be had: {error}.",))
    row = rows[rows["tensor_id"] == tensor_id].iloc[0]
    look = Look(opened, where, row, x, FORMATS[values["format"]], full_labels(rows)[tensor_id])
    return DRAW[values["view"]](look, values)


def listed(opened: Catalog, where: Filter, tensor_id: str) -> pd.DataFrame:
    """The filter's tensors, as many as can be listed, and the one that is looked at."""
    found = opened.tensors(where, limit=MAX_LISTED)
    if tensor_id in set(found["tensor_id"]):
        return found
    return pd.concat([opened.rows_of([tensor_id]), found], ignore_index=True)


def in_filter(opened: Catalog, where: Filter, wanted: str | None, fmt: str) -> str:
    """The tensor that is wanted if it is one of the filter's: else the filter's worst, or its first if none is
    scored. The filter selects at least one."""
    if wanted and not opened.moments(where, "tensor_id", [wanted]).empty:
        return wanted
    scored = opened.scored_formats(where)
    if scored:
        table = ranking_compute.ranking(opened, where, fmt if fmt in scored else scored[0], "sqnr_db")
        if not table.empty:
            return table.iloc[0]["tensor_id"]
    return opened.tensors(where, limit=1).iloc[0]["tensor_id"]
