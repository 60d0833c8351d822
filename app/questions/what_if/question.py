"""Would another format fix it? The values, rounded to any formats with any options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from binade.app.draw import style
from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Offers, Table, Text, source
from binade.app.draw.formatting import bytes_text
from binade.app.questions.question import AS_OPERAND, Question
from binade.app.questions.shared import distribution_charts, format_charts
from binade.app.questions.shared.distributions import Distribution, log2_histogram
from binade.app.questions.shared.families import differences
from binade.app.questions.shared.operands import along
from binade.app.questions.shared.rounded import NOT_RECORDED, applied
from binade.app.questions.shared.scope import Scope, scoped
from binade.app.questions.shared.selection import Of, SelectedTensor, recorded_in
from binade.app.questions.what_if import charts, compute
from binade.app.view import budget
from binade.app.view.params import One, Specs
from binade.collector.advice import scales
from binade.data.compare import evidence
from binade.data.compare.evidence import Sentence, extreme, say, spread_of, together
from binade.data.index.catalog import Catalog, CatalogError
from binade.data.run.store import TensorFileError
from binade.data.run.tensor_kinds import has_tokens
from binade.data.words.filter import Filter
from binade.data.words.text import number_text
from binade.quant.elements import Overflow, RoundingMode
from binade.quant.formats import FORMATS
from binade.quant.metrics import METRICS
from binade.quant.specs import OPTIONS, Spec, SpecError

OWN = "default"
# A rule that is the only one of its format is not offered.
RULES = dict.fromkeys(rule for fmt in FORMATS.values() if len(fmt.scale_rules) > 1 for rule in fmt.scale_rules)
# The values to choose from for each option; OPTIONS says what it means.
VALUES = {
    "scale": ("Scale", tuple(map(str, RULES))),
    "block": ("Block", ("8", "16", "32", "64", "128", "16x16", "32x32", "128x128", "row", "tensor")),
    "error": ("4over6 error", ("mse", "mae")),
    "bound": ("4over6 bound", ("256", "448")),
    "rounding": ("Rounding", tuple(map(str, RoundingMode))),
    "overflow": ("Overflow", tuple(map(str, Overflow))),
    "center": ("Center", ("tokens",)),
    "hadamard": ("Hadamard", ("16", "32", "64", "128")),
    "signs": ("Signs", ("fixed", "random")),
}
ALWAYS = ("scale", "block", "hadamard")  # these are beside the formats, the others folded
NAMES = {name: "block_size" if name == "block" else name for name in VALUES}  # "block" is a number on the same page
HINTS = {
    "rounding": "nearest: ties to even. half_away: ties away from zero. stochastic: seeded; biased if values beyond "
    "the largest code are clipped, as with the default scales of nvfp4 and MX formats"
}
TITLES = {"rounding": {RoundingMode.STOCHASTIC: "stochastic (biased in plain nvfp4, which clips)"}}
CONTROLS = (
    Control(
        name="formats", label="Formats", param=Specs(tuple(FORMATS), ("mxfp8", "mxfp4", "nvfp4", "hifp8")),
        placeholder="choose formats", row="main", width=2.6,
        help="Type a format with its options, such as mxfp4(block=16), to add it",
    ),
    *(
        Control(
            name=NAMES[name], label=label, param=One((OWN, *allowed)), widget="list",
            row="main",
            help=HINTS.get(name, OPTIONS[name].help), titles=TITLES.get(name, {}), folded=name not in ALWAYS,
        )
        for name, (label, allowed) in sorted(VALUES.items(), key=lambda item: item[0] not in ALWAYS)
    ),
    Control(
        name="over", label="Applied to", param=One(("tensor", "selection")),
        titles={"tensor": "this tensor", "selection": "the filter’s operands"}, folded=True, row="main",
    ),
)  # fmt: skip
COLUMNS = {
    "label": Column("Format"),
    "sqnr_db": Column(),
    "flush_to_zero": Column(),
    "saturated": Column(),
    "codes_used": Column("Codes used", text=lambda row: f"{row['codes_used']:,} of {row['codes_total']:,}"),
    "code_entropy_bits": Column("Entropy (bits)", ".2f"),
    "scales": Column(
        "log₂ scales", help="Smallest to largest block scale; all-zero blocks left out",
        text=lambda row: _range(row["scale_exponent_min"], row["scale_exponent_max"]),
    ),
    "bits_per_value": Column("Bits/value", ".4g", help="Including its share of the block’s scale"),
    "nbytes": Column(
        "Size", help="Size of all values in this format", text=lambda row: bytes_text(row["nbytes"])
    ),
}  # fmt: skip
OFFERED = ("scale", "hadamard", "block", "rounding")  # options whose values are compared for the page's format
MOST_OFFERED = 8
MOST_TENSORS = 12
EACH = 1 << 16  # values tried of each tensor of a selection
Tried = tuple[pd.DataFrame, list[Distribution]]


@dataclass(frozen=True)
class TrialPlan:
    """What to try on which tensors, and what to say about it."""

    trials: list[compute.Trial]
    ids: list[str]
    over: str
    said: tuple[str, ...] = ()
    gemm: str = ""  # of one tensor
    scope: Scope | None = None  # of several

    @property
    def limit(self) -> int:
        """Values tried of each tensor, at most."""
        return compute.LIMIT if len(self.ids) == 1 else EACH


def draw(
    selected: SelectedTensor, values: dict[str, Any], done: Callable[[int, int], None] = lambda count, of: None
) -> Drawn:
    made = plan(selected, values)
    if not made.trials or not made.ids:
        return Drawn(problems=made.said)
    drawn = results(selected, made, tried(selected.opened, made, done), _offers(selected, values))
    return replace(drawn, scope=made.scope)


def _offers(selected: SelectedTensor, values: dict[str, Any]) -> Iterator[Offers]:
    """The values of each option in OFFERED, and the best of several together, with which the page's format loses less
    than now."""
    if values["over"] != "tensor":
        return
    now = compute.trial(selected.spec.format.name, **_options(values)).spec
    gains = _gains(selected, now)
    choices = {}
    for gain in gains.found[:MOST_OFFERED]:
        bits = gain.spec.bits_per_value
        cost = f", {bits:.3g} bits" if bits != now.bits_per_value else ""
        named = ", ".join(f"{option} {value}" for option, value in gain.options.items())
        label = f"{named}: {number_text(gain.decibels, '+.1f')} dB{cost}"
        choices[label] = {NAMES[option]: value for option, value in gain.options.items()}
    if choices:
        notes = ["rotations in a sample"] if gains.sampled else []
        notes += [f"{gains.left:,} more options were not tried"] if gains.left else []
        yield Offers(f"Higher SQNR than {now}{f' ({evidence.listed(notes)})' if notes else ''}:", choices)


def _options(values: dict[str, Any]) -> dict[str, str]:
    """The options that are chosen."""
    return {name: values[NAMES[name]] for name in VALUES if values[NAMES[name]] != OWN}


def _gains(selected: SelectedTensor, now: Spec) -> compute.Gains:
    """The gains of the options in OFFERED, cached."""

    def found(_: object = None) -> compute.Gains:
        allowed = {name: VALUES[name][1] for name in OFFERED}
        return compute.gains(selected.x, selected.dim, now, allowed, style.MEASURES["sqnr_db"].resolution)

    opened = selected.opened
    if not opened.cache:
        return found()
    key = ("gains", opened.contents([selected.row["tensor_id"]]), selected.gemm, selected.dim, str(now))
    return opened.cache.get(None, key, found)


def _controls(selected: SelectedTensor, values: dict[str, Any]) -> Iterator[Control]:
    """The controls of options that one of the chosen formats has, with the values that it allows."""
    chosen = _options(values)
    names = {NAMES[name]: name for name in VALUES}
    for control in CONTROLS:
        if control.name not in names:
            yield control
            continue
        option = names[control.name]
        others = {name: value for name, value in chosen.items() if name != option}
        specs = [compute.trial(fmt, **others).spec for fmt in values["formats"]]
        allowed = tuple(value for value in VALUES[option][1] if any(_allows(spec, option, value) for spec in specs))
        if option in chosen:
            allowed = tuple(dict.fromkeys((*allowed, chosen[option])))
        if allowed:
            yield replace(control, options=(OWN, *allowed))


def _allows(spec: Spec, option: str, value: str) -> bool:
    try:
        Spec.of(spec, **{option: value})
    except SpecError:
        return False
    return True


def plan(selected: SelectedTensor, values: dict[str, Any]) -> TrialPlan:
    formats, over, said = values["formats"], values["over"], []
    if not formats:
        return TrialPlan([], [], over, ("Choose a format.",))
    options = _options(values)
    trials = [compute.trial(name, **options) for name in formats]
    centered = any(one.spec.centered for one in trials)
    adapted = [replace(one, spec=applied(one.spec, selected.row)) for one in trials]
    if over == "tensor" and adapted != trials:
        trials = adapted
        said.append(f"Center does not apply to {selected.label}, which has no tokens: the default is used.")
    for name, (title, _) in VALUES.items():
        if without := [one.spec.format.name for one in trials if name in one.ignored]:
            said.append(f"{title} does not apply to {', '.join(without)}: the default is used.")
    if biased := [one.label for one in trials if one.spec.biased]:
        said.append(
            f"Stochastic rounding is biased in {', '.join(biased)}, because large values are clipped. The scales rceil "
            "and 16over17 avoid this."
        )
    trials = compute.with_defaults(trials)
    recorded = selected.recorded if over == "tensor" else NOT_RECORDED
    said += [problem for one in trials if (problem := recorded.problem(one.spec))]
    trials = [one for one in trials if not recorded.problem(one.spec)]
    if recorded.first or recorded.axis is not None:
        said.append(
            f"In {recorded.format}, this GEMM takes what the forward GEMM had rounded, and the error is that of all "
            "roundings. Other formats are rounded once, from the tensor."
        )
    if over == "tensor":
        return TrialPlan(trials, [selected.row["tensor_id"]], over, tuple(said), selected.gemm)
    where = scoped(selected.opened, selected.where, scored=True)
    ids, note = _operands(selected.opened, where, with_tokens=centered)
    if not ids:
        note = f"No operand with values on disk was selected: {where.sentence()}."
    scope = Scope(where, ((len(ids), "operand"),))
    return TrialPlan(trials, ids, over, (*said, note) if note else tuple(said), scope=scope)


def _operands(opened: Catalog, where: Filter, with_tokens: bool) -> tuple[list[str], str]:
    """(the operands of the filter that have values on disk, evenly sampled if there are many; a note). with_tokens:
    only those that have tokens."""
    rows = opened.tensors(where)
    rows = rows[rows["contracted_axis"].notna() & rows["path"].notna() & (rows["numel"] > 0)]
    note = ""
    if with_tokens:
        rows = rows.loc[[*map(has_tokens, rows["layer_type"], rows["tensor_name"])]]
        note = "Only operands with tokens, the inputs and output gradients of linear layers, are tried. "
    if len(rows) > MOST_TENSORS:
        note += f"{MOST_TENSORS} of {len(rows):,} operands, spread evenly, are tried."
        rows = rows.iloc[[index * len(rows) // MOST_TENSORS for index in range(MOST_TENSORS)]]
    return rows["tensor_id"].tolist(), note


def tried(opened: Catalog, made: TrialPlan, done: Callable[[int, int], None]) -> Tried:
    """(a table with a row per trial, the distributions before and after), cached. Raises BudgetError."""
    steps = len(made.ids) * len(made.trials)
    shapes = opened.rows_of(made.ids)[["shape", "contracted_axis"]].itertuples(index=False)
    budget.check(
        budget.RoundingCost(one.spec, tuple(shape), -1 if pd.isna(axis) else int(axis), made.limit)
        for shape, axis in shapes
        for one in made.trials
    )  # fmt: skip

    def found(_: object = None) -> Tried:
        return compute.try_formats(
            _tensors(opened, made), made.trials, together=len(made.ids) > 1, limit=made.limit,
            done=lambda count: done(count, steps),
        )  # fmt: skip

    key = ("what_if_each", tuple(made.ids), made.gemm, opened.contents(made.ids), *(one.label for one in made.trials))
    return opened.cache.get(None, key, found) if opened.cache else found()


def _tensors(opened: Catalog, made: TrialPlan) -> Iterator[compute.TriedOperand]:
    """Each operand; those that cannot be read are left out."""
    for _, row in opened.rows_of(made.ids).iterrows():
        gemm = made.gemm or ("" if pd.isna(row["gemm"]) else str(row["gemm"]))
        try:
            x, axis = along(opened.load(row["tensor_id"]), row, gemm)
            yield compute.TriedOperand(x, axis, recorded_in(opened, row, gemm))
        except (CatalogError, TensorFileError):
            continue


def results(selected: SelectedTensor, made: TrialPlan, tried: Tried, offers: Iterable[Offers] = ()) -> Drawn:
    """The charts of the trials, what is offered, and the table."""
    table, shown = tried
    verdict = _verdict(table, _scored(selected, made))
    table = table.drop(columns="each")
    sampled = selected.x.numel() > made.limit if len(made.ids) == 1 else True
    how = f"a sample of whole lines, at most {made.limit:,} values per tensor" if sampled else "exact"
    what = source(made.scope.where, f"{len(made.ids)} operands ({how})") if made.scope else selected.source(how)
    definitions = " ".join(
        f"{METRICS[name].label}: {METRICS[name].definition}." for name, *_ in format_charts.ERROR_PANELS
    )
    spread = " Of several operands: medians of their own values; the lines reach from the 10th to the 90th percentile."
    rotated = " With a rotation or center=tokens, flushed, saturated and codes refer to the values that are rounded."
    caption = f"{what}\n{definitions}{spread if len(made.ids) > 1 else ''}{rotated}"
    height = format_charts.format_height(table)
    said = (*made.said, f"Computed from {how}.") if sampled else made.said
    items: list[Item] = [
        Figure(f"trials_{index}", panel, table, caption, height=height, group="trials")
        for index, panel in enumerate(format_charts.trial_panels(table))
    ]
    items += [*offers, *(Text(text) for text in said)]
    rows = table.assign(format=table["label"])
    gradients = bool(made.scope) or str(selected.row["tensor_name"]).startswith("grad_")
    about = differences((one.spec for one in made.trials), gradients)
    note = " ".join(filter(None, ("Choose a row to see its format on every page.", about)))
    items.append(Table("trials", rows, COLUMNS, note=note, choose="format"))
    bins = log2_histogram(shown)
    if not bins.empty:
        of = f" · {len(made.ids)} operands together" if len(made.ids) > 1 else ""
        chart = distribution_charts.magnitudes(bins, "values", f"as captured, and rounded to each format{of}")
        height = 360 + style.legend_height(style.groups_of(bins), "top")
        words = f"{what}\nShares of all values per binade; zeros have no magnitude."
        items.append(Figure("trial_histogram", chart, bins, words, height=height))
    if made.over == "tensor" and scales.fits(selected.row):
        items += _by_scale(selected, made.trials)
    return Drawn(tuple(items), verdict)


def _by_scale(selected: SelectedTensor, trials: list[compute.Trial]) -> Iterator[Figure]:
    """Two figures for each format that can have a tensor scale alone."""
    formats = [fmt for fmt in dict.fromkeys(one.spec.format.name for one in trials) if fmt in scales.SCALED]
    if not formats:
        return
    cells = scales.Cells.of(selected.x)
    for fmt in formats:
        swept = compute.sweep_scales(cells, selected.row["absmax"], fmt, trials)
        measure, at_best = style.MEASURES["sqnr_db"], swept.trials.set_index("k")["sqnr_db"][swept.best]
        best, low, high = (number_text(k, ".0f") for k in (swept.best, swept.low, swept.high))
        note = f"Best: k = {best}, SQNR {measure.quantity(at_best)}, "
        if swept.gain > measure.resolution:
            note += f"{measure.quantity(swept.gain)} more than with k = 0."
        else:
            note += f"at most {measure.quantity(measure.resolution)} more than with k = 0."
        note += f" Within {compute.NEAR_DB:g} dB of it: k from {low} to {high}."
        caption = (
            f"{selected.source('exact')}\n{note}\nAs binade scales computes it: x · 2ᵏ is rounded and divided by 2ᵏ."
        )
        yield Figure(f"scales_{fmt}", charts.sqnr_by_scale(swept), swept.trials, caption, note, height=320)
        yield Figure(f"scale_shares_{fmt}", charts.shares_by_scale(swept), swept.trials, caption, height=240)


def _scored(selected: SelectedTensor, made: TrialPlan) -> pd.DataFrame:
    """The recorded SQNR of the tensor in formats that were not tried: columns as of the table of `compute.try_formats`.
    Empty for several operands, which are tried together."""
    tried = {str(one.spec) for one in made.trials}
    rows = selected.opened.scores(tensor_ids=made.ids) if made.over == "tensor" else pd.DataFrame()
    rows = rows[~rows["format"].isin(tried)] if len(rows) else rows
    records = [
        {"label": str(row["format"]), "bits_per_value": Spec.of(row["format"]).bits_per_value, "each": [row["sqnr_db"]]}
        for row in rows.to_dict("records")
    ]
    return pd.DataFrame(records, columns=["label", "bits_per_value", "each"])


def _verdict(table: pd.DataFrame, scored: pd.DataFrame) -> Sentence:
    """The formats with the highest SQNR among those with as many whole bits per value, of those that were tried and
    those that were recorded: more bits always help."""
    measure, said = style.MEASURES["sqnr_db"], []
    table = pd.concat([table[[*scored.columns]], scored], ignore_index=True) if len(scored) else table
    for bits, group in table.groupby(table["bits_per_value"].astype(int)):
        rows = group.to_dict("records")
        by_label = {row["label"]: row["each"] for row in rows}
        items = [(label, spread_of(measure, values)) for label, values in by_label.items() if values]
        low = int(str(bits))
        if len(items) == 1:
            (name, sqnr), *_ = items
            between = {"low": low, "high": low + 1}
            said.append(
                say("SQNR with {low} to {high} bits per value: {name}, {sqnr}.", name=name, sqnr=sqnr, **between)
            )
        elif items:
            what = f"SQNR with {low} to {low + 1} bits per value"
            said.append(extreme(items, what, lowest=False))
    return together(*said)


def _range(low: float, high: float) -> str:
    return "no blocks" if pd.isna(low) else f"{number_text(low, '.0f')} to {number_text(high, '.0f')}"


WHAT_IF = Question(
    text="Would another format fix it?",
    title="What if",
    icon=":material/experiment:",
    help="Round the tensor to any formats, with any options",
    page="tensor",
    of=Of.TENSOR,
    takes=AS_OPERAND,
    view="whatif",
    draw=draw,
    controls=CONTROLS,
    narrow=_controls,
    slow="Rounding",
)
