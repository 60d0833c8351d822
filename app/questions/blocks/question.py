"""Which blocks fail? SQNR and scales block by block, and down to a block's values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Controls, Drawn, Figure, Item, Table, grid
from binade.app.draw.style import MEASURES, power_of_two
from binade.app.questions.blocks import charts, compute
from binade.app.questions.question import AS_OPERAND, Question
from binade.app.questions.shared.rounded import Subject, about_format
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.app.view.params import One, Whole
from binade.data.compare.evidence import Measure, Sentence, exact, say, spread_of, together
from binade.data.words.text import counted, number_text
from binade.quant.metrics import METRICS

METRIC_TITLES = {
    "sqnr_db": "SQNR",
    "flush_to_zero": "Flushed",
    "saturated": "Saturated",
    "scale_exponent": "Scale exponent",
}

METRIC = Control(name="block_metric", label="Metric", param=One(tuple(METRIC_TITLES)), titles=METRIC_TITLES)
BLOCK = Control(name="block", label="Block", param=Whole(0, 10**9), inline=True)
WORST_COLUMNS = {
    "block": Column("Block", "d"),
    "sqnr_db": Column(),
    "flush_to_zero": Column(format=".1f"),
    "saturated": Column(format=".1f"),
    "scale_exponent": Column("log₂ scale", "d"),
    "absmax": Column("absmax", ".3g"),
}
VALUE_COLUMNS = {
    "index": Column("Position"),
    "value": Column("Value", text=lambda row: number_text(row["value"]), align="right"),
    "bits": Column("Code", help="The code’s bits"),
    "code_value": Column("Code’s value", ".6g", help="On the format’s grid, before the scale"),
    "dequantized": Column("Rounded to", text=lambda row: number_text(row["dequantized"]), align="right"),
    "error": Column("Error", text=lambda row: number_text(row["error"]), align="right"),
}


@dataclass(frozen=True)
class BlockTable:
    """A tensor in blocks: one row per block, the worst blocks, the number of blocks in a line, and the caption."""

    subject: Subject
    table: pd.DataFrame
    worst: pd.DataFrame
    per_line: int
    caption: str

    @property
    def size(self) -> int:
        return self.subject.blocks.x.shape[1]


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    metric = values["block_metric"]
    blocks, problem = blocks_of(selected, metric)
    if blocks is None:
        return Drawn(problems=(problem,))
    whole = overall(selected, blocks, metric)
    last, number = len(blocks.table) - 1, int(blocks.worst.iloc[0]["block"])
    block = replace(BLOCK, param=Whole(0, last), placeholder=f"the worst: {number}")
    title = f"**The {len(blocks.worst)} worst blocks** · choose one"
    items: list[Item] = [
        *whole.items,
        Table("worst blocks", blocks.worst, WORST_COLUMNS, title, height=330, choose="block", group="drill", width=3),
        Controls((block,), group="drill", width=3),
    ]
    if values["block"] is not None:
        number = values["block"]
    if number > last:
        problem = f"There is no block {number:,}: the last is {last:,}."
        return replace(whole, items=tuple(items), problems=(*whole.problems, problem))
    figure = block_figure(selected, blocks, number)
    title = f"The {counted(len(figure.table), 'value')} of block {number:,}, with codes and errors"
    table = Table("block values", figure.table, VALUE_COLUMNS, title, height=320, foldable=True)
    return replace(whole, items=(*items, figure, table))


def blocks_of(selected: SelectedTensor, metric: str) -> tuple[BlockTable | None, str]:
    """(the blocks, the reason if there are none)."""
    if not selected.x.numel():
        return None, "The tensor is empty: it has no blocks."
    if selected.problem:
        return None, selected.problem
    subject = selected.rounded()
    table = compute.block_table(subject)
    dim = selected.dim if subject.every == 1 else -1
    shape = tuple(selected.x.shape) if subject.every == 1 else (0, selected.x.shape[selected.dim])
    per_line = compute.blocks_per_line(shape, dim, selected.spec)
    rank = "sqnr_db" if metric == "scale_exponent" else metric
    worst = compute.worst_blocks(table, rank)
    if worst.empty:
        return None, "No block can be scored: all values are zero or not finite."
    definition = f"{METRICS[rank].label}: {METRICS[rank].definition}."
    caption = f"{selected.source(subject.note or 'exact')}\n{about_format(selected.spec)}. {definition}"
    return BlockTable(subject, table, worst, per_line, caption), ""


def overall(selected: SelectedTensor, blocks: BlockTable, metric: str) -> Drawn:
    """The map of all blocks and their scales."""
    table, size, per_line = blocks.table, blocks.size, blocks.per_line
    what = f"{len(table):,} blocks of {size}" + (f" · {blocks.subject.note}" if blocks.subject.note else "")
    cells = compute.block_grid(table[metric].to_numpy(), per_line, "min" if metric == "sqnr_db" else "max")
    chart = charts.block_map(cells, metric, len(table) // per_line, per_line, what)
    note = "Brighter cells are worse. A cell of several blocks shows the worst of them. Gray: not scored."
    figures = [Figure("block_map", chart, grid(cells), blocks.caption, note=note, height=380, group="blocks")]
    exponents, problems = compute.scale_histogram(table), []
    if selected.spec.run(1) is not None:
        spread = f"{len(exponents)} exponents · all-zero blocks left out"
        scales = charts.scale_exponents(exponents, selected.spec, spread)
        figures.append(Figure("scales", scales, exponents, blocks.caption, height=380, group="blocks"))
    else:
        problems.append(f"{selected.spec} has no block scales: the blocks are {size} consecutive values.")
    return Drawn(tuple(figures), _verdict(selected, table, size), tuple(problems))


ENERGY = Measure("energy", "Share of the energy", "%")


def _verdict(selected: SelectedTensor, table: pd.DataFrame, size: int) -> Sentence:
    measure, scored = MEASURES["sqnr_db"], table["sqnr_db"].dropna()
    without = (
        say("{n} blocks are all zero or not finite.", n=len(table) - len(scored)) if len(scored) < len(table) else ""
    )
    if scored.empty:
        return together(without)
    worst, low = scored.min(), table["sqnr_db"] < 10
    energy = float(table.loc[low, "energy"].sum())
    equal = int((scored <= worst + measure.resolution).sum())
    return together(
        say(
            "{low} of {n} blocks of {size} values have an SQNR below 10 dB in {spec}{held}; the median is {median}, "
            "the worst {worst}{equal}.",
            low=int(low.sum()), n=len(scored), size=size, spec=str(selected.spec),
            held=say(" and hold {energy} of the energy", energy=exact(ENERGY, energy)) if low.any() else "",
            median=spread_of(measure, scored, "blocks"), worst=exact(measure, worst),
            equal=say(" in {equal} blocks that are equal", equal=equal) if equal > 1 else "",
        ),
        without,
    )  # fmt: skip


def block_figure(selected: SelectedTensor, blocks: BlockTable, number: int) -> Figure:
    """The values of one block."""
    values = compute.block_values(blocks.subject, number)
    row = blocks.table.iloc[number]
    line, place = divmod(number, blocks.per_line)
    block = selected.spec.block
    tall = block.rows or 1 if block else 1
    wide = blocks.size // tall
    lines = f"line {line:,}" if tall == 1 else f"lines {line * tall:,} to {(line + 1) * tall - 1:,}"
    last = place * wide + (wide if tall > 1 else len(values)) - 1
    where = f"{lines}, values {place * wide:,} to {last:,} along the contracted axis"
    scale = "" if pd.isna(row["scale_exponent"]) else f" · scale {power_of_two(row['scale_exponent'])}"
    text = MEASURES["sqnr_db"].quantity(row["sqnr_db"])
    chart = charts.block_values(values, selected.spec, f"Block {number:,}: {text}{scale}", where)
    words = f"{blocks.caption}\nBlock {number:,}: {where}{scale}."
    note = "Ring: the value. Dot: what it was rounded to. Red: the error."
    return Figure("block_values", chart, values, words, note=note, height=330, group="drill", width=3)


BLOCKS = Question(
    text="Which blocks fail?",
    title="Blocks",
    icon=":material/view_module:",
    help="Scales and SQNR block by block, down to the values",
    page="tensor",
    of=Of.TENSOR,
    takes=AS_OPERAND,
    view="blocks",
    room="why",
    draw=draw,
    of_values=True,
    controls=(METRIC, BLOCK),
)
