"""binade parity."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.output import (
    NOTHING,
    Table,
    aligned,
    markdown,
    output_options,
    print_or_write,
    wrapped,
)
from binade.data.text import counted, csv_cell, markdown_text, number_text
from binade.terminal import Command, one_line

if TYPE_CHECKING:
    from binade.collector.imports.rollouts import Rollouts
    from binade.data.parity import Policies, Row

VALUES = ("over_tokens", "over_sequences", "median_of_tokens", "median_of_sequences")
BY_STEP = ("k3", "abs_logprob", "abs_prob", "pearson", "chi2_token", "chi2_sequence")
"""The quantities of the table by step: those that tools plot."""
LEGEND = (
    "R: rollout, T: training; d = log π_T − log π_R of each token, ρ = e^d. tokens: the mean over all tokens, as in "
    "verl and NeMo-RL; sequences: the mean within each sequence, then over sequences, as in slime and miles.",
    "KL, Jensen–Shannon and χ² are estimates for tokens that were sampled from the rollout policy. One or two tokens "
    "can set the mean of a χ²: its medians are beside it.",
)


def _parity(files: tuple[Path, ...], kind: str, output: Path | None, **given: Any) -> None:
    """Measure how far the log-probabilities of a rollout and a training policy differ.

    FILE is a dump of both policies' log-probabilities: train_data_step*.jsonl of NeMo-RL, token_exports/step_*/*.jsonl
    of prime-rl, or the torch file of --save-debug-train-data of slime or miles.
    """
    if not files:
        raise click.UsageError("FILE is missing: give dumps of log-probabilities")
    from binade.collector.imports.rollouts import read_rollouts

    rollouts = read_rollouts(files)
    text = _csv(rollouts) if kind == "csv" else _document(rollouts, kind)
    print_or_write(text, output, "the table was")


def _quantities_of(rollouts: Sequence[Rollouts]) -> list[tuple[str, str, Policies]]:
    """(tool, step, policies): of all steps, then of each if there are several."""
    from binade.data.parity import joined

    tools = ", ".join(dict.fromkeys(each.tool for each in rollouts))
    whole = (tools, "all", joined([each.policies for each in rollouts]))
    return [whole, *((each.tool, each.step, each.policies) for each in rollouts if len(rollouts) > 1)]


def _document(rollouts: Sequence[Rollouts], kind: str) -> str:
    (tools, _, whole), *steps = _quantities_of(rollouts)
    heading = f"{tools}: {counted(len(rollouts), 'step')}, {_size(whole)}"
    shown = [_table(whole), *([_by_step(rollouts)] if steps else [])]
    return document(heading, shown, LEGEND, kind)


def document(heading: str, shown: Iterable[Table], notes: Iterable[str], kind: str) -> str:
    """A heading, tables and notes, as text or Markdown."""
    if kind == "markdown":
        blocks = [f"### {markdown_text(heading)}", *map(markdown, shown)]
        return "\n\n".join([*blocks, "\n".join(f"* {markdown_text(note)}" for note in notes)]) + "\n"
    return "\n\n".join([wrapped(one_line(heading)), *map(aligned, shown), "\n".join(map(wrapped, notes))]) + "\n"


def _size(pair: Policies) -> str:
    left = f"; {counted(pair.left_out, 'token')} left out: no finite log-probability" if pair.left_out else ""
    return f"{counted(pair.sequences, 'sequence')}, {counted(len(pair.rollout), 'token')}{left}"


def _table(pair: Policies) -> Table:
    from binade.data.parity import quantities

    header = ("quantity", "formula", "tokens", "sequences", "median token", "median sequence")
    rows = (
        (row.measure.axis, row.measure.definition, *(_cell(row, name) for name in VALUES)) for row in quantities(pair)
    )
    return Table("Parity of rollout and training", header, tuple(rows), left=2)


def _cell(row: Row, name: str) -> str:
    value = getattr(row, name)
    return NOTHING if value is None else number_text(value * row.measure.factor, row.measure.format)


def _by_step(rollouts: Sequence[Rollouts]) -> Table:
    """The quantities that tools plot, by step, with their medians over steps."""
    from binade.data.parity import quantities

    by_step = [{row.measure.name: row for row in quantities(each.policies)} for each in rollouts]
    values = [[_main(own[name]) for name in BY_STEP] for own in by_step]
    medians = [statistics.median(column) for column in zip(*values, strict=True)]
    steps = [*(one_line(each.step) for each in rollouts), "median"]
    measures = [by_step[0][name].measure for name in BY_STEP]
    rows = (
        (step, *(number_text(value, measure.format) for value, measure in zip(own, measures, strict=True)))
        for step, own in zip(steps, [*values, medians], strict=True)
    )
    title = "By step, over tokens (χ² of sequences: over sequences)"
    return Table(title, ("step", *(measure.title for measure in measures)), tuple(rows))


def _main(row: Row) -> float:
    """The value of a quantity over tokens; of one of sequences, over sequences."""
    value = row.over_sequences if row.over_tokens is None else row.over_tokens
    assert value is not None
    return value


def _csv(rollouts: Sequence[Rollouts]) -> str:
    """A row per step and quantity, in full precision. Lines end in CR LF."""
    return csv_text(
        {"tool": tool, "step": step, "sequences": pair.sequences, "tokens": len(pair.rollout),
         "left_out": pair.left_out} | quantity
        for tool, step, pair in _quantities_of(rollouts)
        for quantity in csv_rows(pair)
    )  # fmt: skip


def csv_rows(pair: Policies) -> Iterator[dict[str, object]]:
    """The quantities of two policies, as cells by column."""
    from binade.data.parity import quantities

    for row in quantities(pair):
        values = {name: getattr(row, name) for name in VALUES}
        yield {"quantity": row.measure.name, "unit": row.measure.unit.replace("%", "")} | values | {"name": row.tools}


def csv_text(rows: Iterable[dict[str, object]]) -> str:
    """Rows with the same columns as CSV."""
    written = io.StringIO(newline="")
    cells = [{name: csv_cell(value) for name, value in row.items()} for row in rows]
    writer = csv.DictWriter(written, list(cells[0]))
    writer.writeheader()
    writer.writerows(cells)
    return written.getvalue()


parity = Command(
    "parity",
    params=[
        click.Argument(["files"], nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]..."),
        *output_options(),
    ],
    callback=_parity,
    cancelled="cancelled; nothing was written",
    failed="the dumps cannot be read",
)
