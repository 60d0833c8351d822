"""tensor_stats: the selection's numbers as JSON and as text."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd

from binade.app.params import TITLES
from binade.app.questions.distribution import question as distribution
from binade.app.report.contents import STATISTICS_BY
from binade.app.report.frozen import number_text
from binade.app.report.plates import shown
from binade.data.catalog import Catalog
from binade.data.filter import Filter

TEXT_COLUMNS = ("group", "tensors", "numel", "mean", "std", "min", "max", "absmin", "zeros", "nans", "infs", "sqnr_db",
                "flush_to_zero", "saturated")  # fmt: skip


def strict_json(content: Any) -> str:
    """JSON that any reader takes: NaN is null, infinities are the texts "inf" and "-inf"."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if value is None or value is pd.NaT or value is pd.NA:
        return None
    if isinstance(value, pd.Timestamp):
        return value.isoformat()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def tensor_stats(opened: Catalog, where: Filter) -> dict[str, Any]:
    """The selection's totals, `Catalog.moments` by each of STATISTICS_BY, and every tensor's own row."""
    totals = opened.totals(where)
    by = {
        name: distribution.moments(opened, where, opened.rows_of([]), name).to_dict("records") for name in STATISTICS_BY
    }
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
    cells = [[str(name) for name in frame.columns]]
    cells += [[number_text(value) for value in row] for row in frame.itertuples(index=False, name=None)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(frame.columns))]
    return [
        "  " + "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]  # fmt: skip
