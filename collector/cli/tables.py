"""A comparison of recipes as text, CSV or Markdown.

Text and Markdown are for reading: three tables a section, numbers rounded and right-aligned, notes beneath. CSV is for
programs (RFC 4180): one table, full precision, units in the names of the columns, empty where there is nothing to tell.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

from binade.collector.cli.compare import SIDES, Comparison, Rounding, Row, Seconds, Section, Settings
from binade.terminal import one_line

WIDTH = 120
NOTHING = "–"
SIDE_TITLES = {
    ("linear", "forward"): "linear forward",
    ("linear", "backward"): "linear gradients",
    ("FA", "forward"): "FA forward",
    ("FA", "backward"): "FA gradients",
}
LEGEND = (
    "gap: loss − bf16's at the same iteration on the same data; mean gap: over every iteration under the recipe that "
    "both finished (common), warm-up left out; sd: the standard deviation of those gaps; perplexity: exp(mean gap), "
    "times that of bf16.",
    "SQNR: of the summed powers of the recorded operands that the recipe quantizes (of gradients, those entering "
    "dgrad); flushed: nonzero values that became 0, of the nonzero; saturated: values beyond the format's largest, of "
    "all.",
    "Size: the recorded operands, in their exact formats with block scales, or in their own dtype where not quantized. "
    "Time: the median of n optimizer steps, with tensors recorded and without; rounding is emulated, so it says "
    "nothing of hardware that has the format.",
    f"{NOTHING}: not quantized, not recorded, not finished, or (time) no such step, or a run made before steps were "
    "timed.",
)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown. The first `left` columns are words, aligned left, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


def render(comparison: Comparison, kind: str) -> str:
    """The comparison as "text", "csv" or "markdown", its last line ended."""
    return {"text": _text, "csv": _csv, "markdown": _markdown}[kind](comparison)


# What is shown


def heading(settings: Settings) -> str:
    """What the runs of a section share, in words."""
    s = settings
    parts = [
        f"{s.model or 'unnamed model'} {s.size or ''}".strip(),
        f"{s.layers} layers" if s.layers else "",
        f"weights from {s.load_hf}" if s.load_hf else "",
        f"seed {s.seed}" if s.seed is not None else "",
        str(s.dataset or "unnamed data") + (f" (sha256 {str(s.corpus_sha256)[:8]})" if s.corpus_sha256 else ""),
        f"{s.micro_batches} × {s.micro_batch_size} × {s.sequence_length} tokens (micro-batches × sequences × length)"
        if s.micro_batches
        else "",
        f"learning rate {s.learning_rate:g}" if isinstance(s.learning_rate, (int, float)) else "",
        f"{s.warmup_iterations} warm-up iterations" if s.warmup_iterations is not None else "",
        f"on {s.device}" if s.device else "",
        f"{s.tp} ranks" if s.tp != 1 else "",
    ]
    return one_line(", ".join(part for part in parts if part))


def tables(section: Section) -> list[Table]:
    """Loss, rounding (if anything was rounded), size and time."""
    sides = [side for side in SIDES if any(row.rounding(*side) for row in section.rows)]
    found = [
        Table(
            "Loss, in nats per token",
            (
                "recipe",
                "state",
                "runs",
                "steps",
                "loss",
                "common",
                "loss there",
                "bf16 there",
                "gap",
                "mean gap",
                "sd",
                "perplexity",
            ),
            tuple(_loss_cells(row) for row in section.rows),
            left=2,
        ),
        Table(
            "Rounding: SQNR, dB / flushed to zero, % / saturated, %",
            ("recipe", *(SIDE_TITLES[side] for side in sides)),
            tuple((one_line(row.label), *(_rounding(row.rounding(*side)) for side in sides)) for row in section.rows),
        ),
        Table(
            "Size of the recorded operands, time of an iteration",
            ("recipe", "operands", "bits/value", "MB", "MB in bf16", "ratio", "s recorded", "n", "s unrecorded", "n"),
            tuple(_cost_cells(row) for row in section.rows),
        ),
    ]
    return found if sides else [found[0], found[2]]


def notes(section: Section) -> list[str]:
    """What a reader should know of this section before believing it."""
    found = []
    if section.reference is None:
        found.append("No bf16 run of these settings finished an iteration: there is no gap to tell.")
    elif section.reference.state != "done":
        found.append(f"The bf16 run is {section.reference.state}: gaps are to the iterations that it finished.")
    for row in section.rows:
        if row.reason:
            found.append(f"{row.label}: {row.reason}.")
        if row.runs > 1:
            found.append(f"{row.label}: {row.runs} runs; shown is the longest, of these the newest, {row.run_id}.")
        if row.loss_spread is not None:
            found.append(f"{row.label}: at the last iteration of all its runs, losses differ by {row.loss_spread:.2g}.")
    recorded = {row.storage.values for row in section.rows if row.storage}
    if len(recorded) > 1:
        found.append("Not every run recorded as many operands: SQNR, size and recorded time are of different tensors.")
    backends = _by(section.rows, lambda row: row.backend)
    if len(backends) > 1:
        listed = "; ".join(f"{', '.join(labels)}: {backend}" for backend, labels in backends.items())
        found.append(f"Times are not all of one set-up. {listed}.")
    return [one_line(note) for note in found]


def _by(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row.label)
    return found


def _loss_cells(row: Row) -> tuple[str, ...]:
    gap = row.gap
    compared = (
        (
            str(gap.iterations),
            f"{gap.loss:.4f}",
            f"{gap.bf16_loss:.4f}",
            f"{gap.last:+.4f}",
            f"{gap.mean:+.4f}",
            NOTHING if gap.deviation is None else f"{gap.deviation:.4f}",
            f"{gap.perplexity_ratio:.4f}",
        )
        if gap
        else (NOTHING,) * 7
    )
    loss = NOTHING if row.loss is None else f"{row.loss:.4f}"
    return (one_line(row.recipe), row.state, str(row.runs), str(row.iterations), loss, *compared)


def _rounding(rounding: Rounding | None) -> str:
    if rounding is None:
        return NOTHING
    return f"{rounding.sqnr_db:.2f} / {_percent(rounding.flush_to_zero)} / {_percent(rounding.saturated)}"


def _percent(share: float) -> str:
    """A share in %: a few are not shown as none."""
    return "<0.01" if 0 < share < 0.00005 else f"{100 * share:.2f}"


def _cost_cells(row: Row) -> tuple[str, ...]:
    stored = row.storage
    size = (
        (
            f"{stored.tensors}",
            f"{stored.bits_per_value:.2f}",
            f"{stored.nbytes / 1e6:.2f}",
            f"{stored.bf16_bytes / 1e6:.2f}",
            f"{stored.ratio:.3f}",
        )
        if stored
        else (NOTHING,) * 5
    )
    return (one_line(row.label), *size, *_time(row.recorded), *_time(row.unrecorded))


def _time(seconds: Seconds | None) -> tuple[str, str]:
    return (f"{seconds.median:.3f}", str(seconds.iterations)) if seconds else (NOTHING, NOTHING)


# Text and Markdown


def _text(comparison: Comparison) -> str:
    blocks = []
    for section in comparison.sections:
        blocks.append(_wrapped(heading(section.settings)))
        blocks += [f"{table.title}\n{_aligned(table)}" for table in tables(section)]
        if said := notes(section):
            blocks.append("\n".join(_wrapped(note, "* ") for note in said))
    blocks.append("\n".join(_wrapped(line) for line in LEGEND))
    return "\n\n".join(blocks) + "\n"


def _wrapped(text: str, first: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent="  ", break_on_hyphens=False)


def _aligned(table: Table) -> str:
    lines = (table.header, *table.rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < table.left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _markdown(comparison: Comparison) -> str:
    blocks = []
    for section in comparison.sections:
        blocks.append(f"### {_escaped(heading(section.settings))}")
        for table in tables(section):
            blocks.append(f"{table.title}:")
            rule = [":--" if place < table.left else "--:" for place in range(len(table.header))]
            lines = (table.header, rule, *([_escaped(cell) for cell in row] for row in table.rows))
            blocks.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        if said := notes(section):
            blocks.append("\n".join(f"* {_escaped(note)}" for note in said))
    blocks.append("\n".join(f"* {line}" for line in LEGEND))
    return "\n\n".join(blocks) + "\n"


def _escaped(text: str) -> str:
    """As it is in Markdown: no cell, link, tag or emphasis is made of it."""
    return "".join(f"\\{c}" if c in "\\|*_`[]<>#" else c for c in text)


# CSV

Cell = str | int | float | bool | None
COLUMNS: dict[str, Callable[[Row], Cell]] = {
    "recipe": lambda row: row.recipe,
    "state": lambda row: row.state,
    "runs": lambda row: row.runs,
    "run_id": lambda row: row.run_id,
    "backend": lambda row: row.backend,
    "iterations": lambda row: row.iterations,
    "loss_nats": lambda row: row.loss,
    "loss_spread_nats": lambda row: row.loss_spread,
    "common_iterations": lambda row: row.gap.iterations if row.gap else None,
    "common_iteration": lambda row: row.gap.iteration if row.gap else None,
    "loss_at_common_iteration_nats": lambda row: row.gap.loss if row.gap else None,
    "bf16_loss_at_common_iteration_nats": lambda row: row.gap.bf16_loss if row.gap else None,
    "gap_at_common_iteration_nats": lambda row: row.gap.last if row.gap else None,
    "gap_mean_nats": lambda row: row.gap.mean if row.gap else None,
    "gap_deviation_nats": lambda row: row.gap.deviation if row.gap else None,
    "perplexity_ratio": lambda row: row.gap.perplexity_ratio if row.gap else None,
    "operands": lambda row: row.storage.tensors if row.storage else None,
    "operand_values": lambda row: row.storage.values if row.storage else None,
    "operand_bits_per_value": lambda row: row.storage.bits_per_value if row.storage else None,
    "operand_bytes": lambda row: row.storage.nbytes if row.storage else None,
    "operand_bytes_in_bf16": lambda row: row.storage.bf16_bytes if row.storage else None,
    "recorded_iteration_median_seconds": lambda row: row.recorded.median if row.recorded else None,
    "recorded_iterations_timed": lambda row: row.recorded.iterations if row.recorded else None,
    "unrecorded_iteration_median_seconds": lambda row: row.unrecorded.median if row.unrecorded else None,
    "unrecorded_iterations_timed": lambda row: row.unrecorded.iterations if row.unrecorded else None,
}
ROUNDING_COLUMNS: dict[str, Callable[[Rounding], Cell]] = {
    "sqnr_db": lambda rounding: rounding.sqnr_db,
    "flush_to_zero_share": lambda rounding: rounding.flush_to_zero,
    "saturated_share": lambda rounding: rounding.saturated,
    "operands": lambda rounding: rounding.tensors,
}


def _csv(comparison: Comparison) -> str:
    """Lines end in CR LF. A section's settings are in the first columns of each of its rows."""
    written = io.StringIO(newline="")
    writer = csv.writer(written)
    rounded = [f"{SIDE_TITLES[side].replace(' ', '_').lower()}_{name}" for side in SIDES for name in ROUNDING_COLUMNS]
    writer.writerow([*(f.name for f in fields(Settings)), *COLUMNS, *rounded])
    for section in comparison.sections:
        for row in section.rows:
            sides = [(row.rounding(*side), value) for side in SIDES for value in ROUNDING_COLUMNS.values()]
            writer.writerow(
                [
                    *astuple(section.settings),
                    *(value(row) for value in COLUMNS.values()),
                    *(value(rounding) if rounding else None for rounding, value in sides),
                ]
            )
    return written.getvalue()
