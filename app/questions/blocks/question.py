"""Which blocks fail? SQNR and scales block by block, and down to a block's values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from binade.app.figure import Drawn, Figure, grid
from binade.app.params import One, Param, Whole
from binade.app.questions.blocks import charts, compute
from binade.app.questions.question import Question, not_in_report
from binade.app.questions.shared.rounded import Subject, about_format
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.quant.metrics import METRICS

METRIC_TITLES = {
    "sqnr_db": "SQNR",
    "flush_to_zero": "Flushed",
    "saturated": "Saturated",
    "scale_exponent": "Scale exponent",
}


@dataclass(frozen=True)
class Blocks:
    """A tensor in blocks: a row each, the worst of them, blocks in a line of the tensor, and the captions' words."""

    subject: Subject
    table: pd.DataFrame
    worst: pd.DataFrame
    per_line: int
    caption: str

    @property
    def size(self) -> int:
        return self.subject.blocks.x.shape[1]


def params(opened: Catalog) -> dict[str, Param]:
    return {"block_metric": One(tuple(METRIC_TITLES)), "block": Whole(0, 10**9)}


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    found, problem = blocks_of(selected, values["block_metric"])
    if found is None:
        return Drawn(problems=(problem,))
    whole = overall(selected, found, values["block_metric"])
    if problem := beyond(found, values["block"]):
        return replace(whole, problems=(*whole.problems, problem), tables={"worst blocks": found.worst})
    figures = (*whole.figures, block(selected, found, values["block"])[0])
    return Drawn(figures, whole.verdict, whole.problems, {"worst blocks": found.worst})


def blocks_of(selected: SelectedTensor, metric: str) -> tuple[Blocks | None, str]:
    """(the blocks, why there are none)."""
    if not selected.x.numel():
        return None, "The tensor is empty: it has no blocks."
    found = selected.rounded()
    table = compute.block_table(found)
    dim = selected.dim if found.every == 1 else -1
    shape = tuple(selected.x.shape) if found.every == 1 else (0, selected.x.shape[selected.dim])
    per_line = compute.blocks_per_line(shape, dim, selected.format.name)
    rank = "sqnr_db" if metric == "scale_exponent" else metric
    worst = compute.worst_blocks(table, rank)
    if worst.empty:
        return None, "No block has anything to lose: all values are zero or not finite."
    definition = f"{METRICS[rank].label}: {METRICS[rank].definition}."
    caption = f"{selected.source(found.note or 'exact')}\n{about_format(selected.format)}. {definition}"
    return Blocks(found, table, worst, per_line, caption), ""


def overall(selected: SelectedTensor, found: Blocks, metric: str) -> Drawn:
    """The map of all blocks and their scales."""
    table, size, per_line = found.table, found.size, found.per_line
    what = f"{len(table):,} blocks of {size}" + (f" · {found.subject.note}" if found.subject.note else "")
    cells = compute.block_grid(table[metric].to_numpy(), per_line, "min" if metric == "sqnr_db" else "max")
    chart = charts.block_map(cells, metric, len(table) // per_line, per_line, what)
    note = "Bright is bad; a cell of several blocks shows its worst. Grey: nothing to lose."
    figures = [Figure("block_map", chart, grid(cells), found.caption, note=note, height=380, group="blocks")]
    exponents, problems = compute.scale_histogram(table), []
    if selected.format.block_size:
        spread = f"{len(exponents)} exponents · all-zero blocks left out"
        scales = charts.scale_exponents(exponents, selected.format, spread)
        figures.append(Figure("scales", scales, exponents, found.caption, height=380, group="blocks"))
    else:
        problems.append(f"{selected.format.title} has no block scales: the blocks are runs of {size} values.")
    return Drawn(tuple(figures), _verdict(selected, table, size), tuple(problems))


def _verdict(selected: SelectedTensor, table: pd.DataFrame, size: int) -> str:
    finite = table["sqnr_db"].dropna()
    median = MEASURES["sqnr_db"].text(float(finite.median())) if len(finite) else "no value"
    low = int((finite < 10).sum())
    return (
        f"{low:,} of {len(table):,} blocks of {size} stay below 10 dB in {selected.format.name}; "
        f"the median is {median} dB, the worst {MEASURES['sqnr_db'].text(float(finite.min()))} dB."
    )


def beyond(found: Blocks, asked: int | None) -> str:
    """What to say of a block that is asked for and beyond the last; "" of any other."""
    last = len(found.table) - 1
    return f"There is no block {asked:,}: the last is {last:,}." if asked is not None and asked > last else ""


def block(selected: SelectedTensor, found: Blocks, asked: int | None) -> tuple[Figure, int]:
    """(the values of one block, its number): the one asked for, with None the worst."""
    number = int(found.worst.iloc[0]["block"]) if asked is None else asked
    values = compute.block_values(found.subject, number)
    row = found.table.iloc[number]
    line, place = divmod(number, found.per_line)
    first = place * found.size
    where = f"line {line:,}, values {first:,} to {first + len(values) - 1:,} along the contracted axis"
    scale = "" if pd.isna(row["scale_exponent"]) else f" · scale 2^{row['scale_exponent']:.0f}"
    text = MEASURES["sqnr_db"].text(row["sqnr_db"])
    chart = charts.block_values(values, selected.format, f"Block {number:,}: {text} dB{scale}", where)
    words = f"{found.caption}\nBlock {number:,}: {where}{scale}."
    note = "Ring: the value. Dot: what it was rounded to. Red: the error."
    return Figure("block_values", chart, values, words, note=note, height=330), number


BLOCKS = Question(
    text="Which blocks fail?",
    title="Blocks",
    icon=":material/view_module:",
    help="Scales and SQNR block by block, down to the values",
    page="tensor",
    view="blocks",
    draw=draw,
    params=params,
    layout="binade.app.questions.blocks.view",
    report=not_in_report,
)
