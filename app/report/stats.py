"""tensor_stats: the selection's numbers as JSON and as text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.explore.compute import moments
from binade.app.questions.explore.question import REPORTED_BY
from binade.app.report.tables import cells, shown
from binade.app.view.params import TITLES
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

TEXT_COLUMNS = ("group", "tensors", "numel", "mean", "std", "min", "max", "absmin", "zeros", "nans", "infs", "sqnr_db",
                "flush_to_zero", "saturated")  # fmt: skip


def strict_json(content: Any) -> str:
    """JSON that any parser reads: NaN is null, infinities are the strings "inf" and "-inf"."""
    constants = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}
    plain = json.loads(json.dumps(content, default=_plain), parse_constant=constants.get)
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """Convert an object for json."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    return None if value is pd.NaT or value is pd.NA else value.isoformat()


def tensor_stats(opened: Catalog, where: Filter) -> dict[str, Any]:
    """The selection's totals, `Catalog.moments` by each of REPORTED_BY, and every tensor's own row."""
    totals = opened.totals(where)
    by = {name: moments(opened, where, opened.rows_of([]), name).to_dict("records") for name in REPORTED_BY}
    return {
        "root": opened.root.name,
        "filter": where.to_dict(),
        "totals": {
            "tensors": totals.tensors, "values": totals.elements, "bytes": totals.nbytes,
            "tensors_with_values": totals.with_values, "runs": totals.runs,
        },
        "statistics_by": by,
        "tensors": opened.tensors(where).drop(columns=["path"]).to_dict("records"),
    }  # fmt: skip


def as_text(stats: dict[str, Any], sentence: str) -> str:
    """The same as tables to read, without the single tensors; statistics are over the finite values."""
    totals = stats["totals"]
    lines = [
        f"Binade: statistics of {sentence}",
        f"{totals['tensors']:,} tensors of {totals['runs']:,} runs, {totals['values']:,} values, "
        f"{totals['bytes']:,} bytes; over the finite values",
    ]
    for name, rows in stats["statistics_by"].items():
        lines += ["", f"By {TITLES[name].lower()}", *_aligned(pd.DataFrame(rows, columns=list(TEXT_COLUMNS)))]
    return "\n".join(lines) + "\n"


def _aligned(frame: pd.DataFrame) -> list[str]:
    frame = shown(frame)
    rows = [[str(name) for name in frame.columns], *cells(frame)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(["", row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
