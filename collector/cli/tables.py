"""A comparison of recipes as text, CSV or Markdown.

Text and Markdown are for reading: a few tables per section, numbers rounded and right-aligned, notes beneath. CSV is
for programs (RFC 4180): one table, full precision, units in the names of the columns, empty where there is no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields

from binade.collector.cli.compare import (
    BF16_BITS,
    FIGURES,
    MEASURES,
    SIDES,
    Comparison,
    Row,
    Section,
    Settings,
    rounding_figure,
)
from binade.collector.cli.output import NOTHING, Table, aligned, csv_text, markdown, wrapped
from binade.collector.recipes.recipe import BF16
from binade.collector.recipes.seeds import JUDGED, Gaps, judged
from binade.data import evidence, gap_bands
from binade.data.published_gaps import published_for
from binade.data.runs import DONE
from binade.data.text import markdown_text
from binade.terminal import one_line

ROW_COLUMNS = ("recipe", "state", "runs", "seed", "seeds", "run_id", "backend", "iterations")
LEGEND = (
    "gap: loss − loss of bf16 at the same iteration on the same data; mean gap: mean over the recipe's iterations "
    "that both runs finished (common), excluding warm-up; sd: the standard deviation of those gaps; perplexity: "
    "exp(mean gap), relative to bf16.",
    "SQNR: the median over the operands that the recipe quantizes (for gradients, those that enter dgrad) in the last "
    "recorded iteration; flushed, saturated: the medians of the shares of the nonzero values that became 0, and of all "
    "values beyond the format's largest. Plain mxfp8 rounds gradients to mxfp8_e5m2.",
    "Gradients: of the weights, over all seeds, each compared with that of the bf16 run with the same seed: medians "
    "over the tensors of the cosine and of the relative squared error ‖ĝ−g‖²/‖g‖², where g is bf16's.",
    "Bands hold 95% of the mean gaps between two bf16 runs with these settings: with other seeds, or of the same "
    "weights and data in another order of reduction. One seed is placed by its value. Published gaps are of other "
    "models.",
    "Size: the recorded operands, in their exact formats with block scales, or in their own dtype where not quantized. "
    "Time: the median of n optimizer steps, with tensors recorded and without; rounding is emulated, so times say "
    "nothing about hardware that supports the format.",
    "Over seeds: each seed's mean gap is relative to the bf16 run with that seed; sd: the standard deviation of these "
    f"gaps. {JUDGED} A step of an ablation is compared with the step before, or with the full recipe.",
    f"{NOTHING}: not quantized, not recorded or not finished; for times, no such step, or steps that were not timed.",
)


NumberColumn = tuple[str, str, str, float]
"""Title, figure, format, divisor."""
LOSS = (
    ("loss", "loss_nats", ".4f", 1),
    ("common", "common_iterations", "", 1),
    ("loss (common)", "loss_at_common_iteration_nats", ".4f", 1),
    ("bf16 (common)", "bf16_loss_at_common_iteration_nats", ".4f", 1),
    ("gap", "gap_at_common_iteration_nats", "+.4f", 1),
    ("mean gap", "gap_mean_nats", "+.4f", 1),
    ("sd", "gap_deviation_nats", ".4f", 1),
    ("perplexity", "perplexity_ratio", ".4f", 1),
)
COST = (
    ("operands", "operands", "", 1),
    ("bits/value", "operand_bits_per_value", ".2f", 1),
    ("MB", "operand_bytes", ".2f", 1e6),
    ("MB in bf16", "operand_bytes_in_bf16", ".2f", 1e6),
    ("ratio", "operand_bits_per_value", ".3f", BF16_BITS),
    ("s recorded", "recorded_iteration_median_seconds", ".3f", 1),
    ("n", "recorded_iterations_timed", "", 1),
    ("s unrecorded", "unrecorded_iteration_median_seconds", ".3f", 1),
    ("n", "unrecorded_iterations_timed", "", 1),
)


GRADIENT = (
    ("pairs", "gradient_pairs", "", 1),
    ("cosine", "gradient_cosine", ".4f", 1),
    ("rel. sq. error", "gradient_relative_squared_error", ".3g", 1),
)
SEEDS = ("seeds", "mean gap", "sd", "95% interval", "change", "verdict")


def render(comparison: Comparison, kind: str) -> str:
    """The comparison as "text", "csv" or "markdown", its last line ended."""
    return {"text": _text, "csv": _csv, "markdown": _markdown}[kind](comparison)


# What is shown


def heading(section: Section) -> str:
    """A description of what the runs of a section share, and their seeds."""
    s = section.settings
    seeds = [str(seed) for seed in section.seeds if seed is not None]
    parts = [
        f"{s.model or 'unnamed model'} {s.size or ''}".strip(),
        f"{s.layers} layers" if s.layers else "",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else "",
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
    """Loss; gaps over seeds if there are several, or an ablation; any rounding and gradients; size and time."""
    rows = section.rows
    loss = ((one_line(row.recipe), row.state, str(row.runs), str(row.iterations), *_cells(row, LOSS)) for row in rows)
    header = ("recipe", "state", "runs", "steps", *(title for title, *_ in LOSS))
    shown = [Table("Loss, in nats per token", header, tuple(loss), left=2), *_over_seeds(section)]
    if sides := [side for side in SIDES if any(rounding_figure(side, "operands") in row.figures for row in rows)]:
        cells = ((one_line(row.label), *(_rounding(row, side) for side in sides)) for row in rows)
        title = "Rounding: SQNR, dB / flushed to zero, % / saturated, %"
        shown.append(Table(title, ("recipe", *sides), tuple(cells)))
    if compared := [row for row in rows if "gradient_cosine" in row.figures]:
        title = f"Gradients compared with bf16, iteration {compared[0].figures['gradient_iteration']}"
        shown.append(_table(title, compared, GRADIENT))
    return [*shown, _table("Size of the recorded operands and time per iteration", rows, COST)]


def _table(title: str, rows: Iterable[Row], columns: Sequence[NumberColumn]) -> Table:
    cells = tuple((one_line(row.label), *_cells(row, columns)) for row in rows)
    return Table(title, ("recipe", *(column for column, *_ in columns)), cells)


def _over_seeds(section: Section) -> Iterator[Table]:
    """A table for each ladder, and one for the other recipes where one of them has several seeds."""
    gaps = {row.recipe: row.gaps for row in section.rows if row.state == DONE}
    for ladder in section.ladders:
        rungs = [rung for rung in ladder.rungs if rung.recipe in gaps]
        titles = {rung.recipe: rung.title for rung in rungs}
        cells = _judged(gaps, [(rung.recipe, rung.against) for rung in rungs], titles)
        title = f"Ablation of {one_line(ladder.name)}: mean gap to bf16 over seeds, in nats per token"
        yield Table(title, ("step", *SEEDS), tuple((rung.title, *own) for rung, own in zip(rungs, cells, strict=True)))
    on_ladders = {rung.recipe for ladder in section.ladders for rung in ladder.rungs}
    others = [recipe for recipe in gaps if gaps[recipe] and recipe not in on_ladders and recipe != BF16]
    if any(len(gaps[recipe]) > 1 for recipe in others):
        cells = _judged(gaps, [(recipe, BF16) for recipe in others], {BF16: BF16})
        rows = tuple((one_line(recipe), *own) for recipe, own in zip(others, cells, strict=True))
        yield Table("Mean gap to bf16 over seeds, in nats per token", ("recipe", *SEEDS), rows)


def _judged(gaps: Gaps, pairs: Sequence[tuple[str, str]], titles: Mapping[str, str]) -> Iterator[list[str]]:
    """The cells of SEEDS of each pair of a recipe and the one that it is compared with."""
    for (recipe, _), result in zip(pairs, judged(gaps, pairs, titles), strict=True):
        cells = [NOTHING] * len(SEEDS)
        if own := result.own:
            cells[0] = str(own.n)
        if own and recipe != BF16:
            cells[1] = f"{own.value:+.4f}"
            if own.n > 1:
                cells[2:4] = f"{result.deviation:.4f}", f"{own.low:+.4f} to {own.high:+.4f}"
        if result.change:
            cells[4:] = f"{result.change.value:+.4f}", result.verdict
        yield cells


def _cells(row: Row, columns: Sequence[NumberColumn]) -> Iterator[str]:
    for _, name, spec, divisor in columns:
        value = row.figures.get(name)
        yield NOTHING if value is None else format(value if divisor == 1 else value / divisor, spec)


def notes(section: Section) -> list[str]:
    """Notes that limit what a reader can conclude from this section."""
    found = []
    if section.reference is None:
        found.append("No bf16 run with these settings finished an iteration, so there is no gap.")
    elif section.unreferenced:
        s, that = ("s", "those seeds") if len(section.unreferenced) > 1 else ("", "that seed")
        seeds = f"seed{s} {', '.join(map(str, section.unreferenced))}"
        found.append(f"No bf16 run with {seeds} finished an iteration, so runs with {that} have no gap.")
    if section.reference is not None and section.reference.state != DONE:
        found.append(f"The bf16 run is {section.reference.state}: gaps cover only the iterations that it finished.")
    if section.caveat:
        found.append(section.caveat)
    for row in section.rows:
        if (first := row.figures.get("gap_before_training_nats")) is not None:
            added = row.figures.get("gap_added_by_training_nats")
            later = "" if added is None else f"; training adds {evidence.GAP.quantity(added)}"
            change = evidence.GAP.quantity(first)
            found.append(
                f"{row.label}: rounding alone, on bf16's weights and data, changes the loss by {change}{later}."
            )
    gaps = [row.gaps for row in section.rows if row.gaps]
    if gaps and all(len(each) == 1 for each in gaps):
        doubt = "One seed cannot tell what training adds from chance."
        found.append(f"{doubt} To collect more seeds: binade ablate RECIPE --seeds N.")
    compared = [row for row in section.rows if row.gaps]
    found += gap_bands.placed((row.label, row.gap, row.bands) for row in compared)
    found += gap_bands.missing(band for row in compared for band in row.bands)
    found += map(str, published_for([row.formats for row in compared]))
    usual = section.rows[0].seed
    if len(section.seeds) > 1:
        found.append(f"Seeds {', '.join(map(str, section.seeds))}: tables that do not combine seeds show seed {usual}.")
    for row in section.rows:
        if row.reason:
            found.append(f"{row.label}: {row.reason}.")
        if row.seed != usual:
            found.append(f"{row.label}: seed {row.seed} is shown.")
        if row.runs > len(row.seeds):
            found.append(f"{row.label}: {row.runs} runs; the longest is shown (ties go to the newest): {row.run_id}.")
        if (spread := row.figures.get("loss_spread_nats")) is not None:
            found.append(f"{row.label}: at the last iteration of all its runs, losses differ by {spread:.2g}.")
    if len({row.figures.get("operand_values") for row in section.rows} - {None}) > 1:
        found.append(
            "The runs recorded different numbers of operands: SQNR, size and recorded time cover different tensors."
        )
    backends: dict[str, list[str]] = {}
    for row in section.rows:
        backends.setdefault(row.backend, []).append(row.label)
    if len(backends) > 1:
        listed = "; ".join(f"{', '.join(labels)}: {backend}" for backend, labels in backends.items())
        found.append(f"Times were measured on different set-ups. {listed}.")
    return [one_line(note) for note in found]


def _rounding(row: Row, side: str) -> str:
    sqnr, *shares = (row.figures.get(rounding_figure(side, measure)) for measure in MEASURES.values())
    return NOTHING if sqnr is None else " / ".join([f"{sqnr:.2f}", *(_percent(share or 0.0) for share in shares)])


def _percent(share: float) -> str:
    """A share in %. A small share is not shown as zero."""
    return "<0.01" if 0 < share < 0.00005 else f"{100 * share:.2f}"


# Text and Markdown


def _document(
    comparison: Comparison,
    head: Callable[[str], str],
    table: Callable[[Table], str],
    note: Callable[[str], str],
    legend: Callable[[str], str],
) -> str:
    """The sections and the legend, each part written by its function."""
    blocks = []
    for section in comparison.sections:
        blocks += [head(heading(section)), *map(table, tables(section))]
        if remarks := notes(section):
            blocks.append("\n".join(map(note, remarks)))
    return "\n\n".join([*blocks, "\n".join(map(legend, LEGEND))]) + "\n"


def _text(comparison: Comparison) -> str:
    return _document(comparison, wrapped, aligned, lambda note: wrapped(note, "* "), wrapped)


def _markdown(comparison: Comparison) -> str:
    return _document(
        comparison,
        lambda text: f"### {markdown_text(text)}",
        markdown,
        lambda text: f"* {markdown_text(text)}",
        "* {}".format,
    )


# CSV


def _csv(comparison: Comparison) -> str:
    """A section's settings are in the first columns of each of its rows."""
    rows: list[dict[str, object]] = []
    for section in comparison.sections:
        for row in section.rows:
            own = {name: getattr(row, name) for name in ROW_COLUMNS}
            own["seeds"] = " ".join(map(str, row.seeds))
            rows.append(asdict(section.settings) | own | dict(row.figures))
    return csv_text(rows, (*(each.name for each in fields(Settings)), *ROW_COLUMNS, *FIGURES))
