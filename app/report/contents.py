"""What a report holds, whatever it is written to: parts of plates (figures ready to be drawn) and tables.

`parts` yields them one after the other, so that drawing begins with the first. Everything comes from the index but the
attention maps, the codes and the token maps of a few tensors, and gradients held against bf16's, which read values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import altair as alt
import pandas as pd

from binade.app.figure import Drawn, Figure
from binade.app.formatting import big, first_formats
from binade.app.pages import overview
from binade.app.pages.registry import PAGES
from binade.app.params import TITLES, read
from binade.app.questions.attention import question as attention
from binade.app.questions.codes import question as codes
from binade.app.questions.depth import question as depth
from binade.app.questions.directions import question as directions
from binade.app.questions.distribution import question as distribution
from binade.app.questions.question import Question
from binade.app.questions.ranking import compute as ranking_compute
from binade.app.questions.ranking import question as ranking
from binade.app.questions.recipes import question as recipes
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.labels import full_labels
from binade.app.questions.shared.runs import runs_with_reference
from binade.app.questions.shared.selection import Board, SelectedTensor, Selection
from binade.app.questions.training import question as training
from binade.app.questions.why import question as why
from binade.app.report import hifp8
from binade.app.report import runs as run_tables
from binade.app.report.plates import Part, Plate, Table, plates
from binade.app.style import MEASURES
from binade.data.catalog import Catalog, CatalogError
from binade.data.filter import Filter
from binade.data.store import TensorFileError
from binade.data.tensor_kinds import label_of
from binade.quant.formats import FORMATS

GROUPINGS = ("quant_type", "recipe", "layer_type", "operation", "module", "tensor_name", "layer_index", "iteration")
STATISTICS_BY = ("quant_type", "recipe", "layer_type", "operation", "module", "tensor_name", "layer_index")
OF_VALUES = ("absmax", "std", "kurtosis", "crest_factor", "dynamic_range", "zero_share")
WITHIN = 6  # quant types whose tensors are drawn beside each other
LOOKED_AT = 4  # tensors whose codes are counted
ATTENTION_PLACES = 8  # layers of runs whose attention maps are drawn
GRADIENT_VALUES = 1 << 26  # values that are read to hold gradients against bf16's
MAX_WORST = 200  # places that a table ranks


def parts(opened: Catalog, where: Filter, command: str) -> Iterator[Part]:
    """The parts of the report of what a filter selects, which must be something. command made it."""
    formats = first_formats(opened)
    scored = tuple(name for name in formats if name in set(opened.scored_formats(where)))
    yield _overview(opened, where)
    lying = {by: _lie(opened, where, by) for by in _present(opened, where, GROUPINGS)}
    yield _distributions(opened, where, lying)
    yield _heatmaps(opened, where, scored)
    yield _comparisons(opened, where, scored)
    yield _statistics(opened, where, scored, lying)
    yield _hifp8(opened, where, scored)
    yield _attention(opened, where)
    yield from (_answer(opened, where, question) for question in QUESTIONS if question.in_report)
    yield run_tables.part(opened, run_tables.selected(opened, where))
    yield run_tables.definitions()
    yield run_tables.made_with(command)


def _overview(opened: Catalog, where: Filter) -> Part:
    figures = [replace(f, name=f.name.removeprefix("panel_")) for f in overview.panels(opened, where)]
    problems = () if figures else ("Nothing to draw: no nonzero value is finite.",)
    text = "How the magnitudes of all selected values lie, and of each group by itself."
    return Part("overview", "Overview", plates("overview", figures), text=text, problems=problems)


def quick(overview_part: Part) -> Figure | None:
    """The overview's panels as one picture; None if there is none."""
    figures = [plate.figure for plate in overview_part.plates]
    if not figures:
        return None
    charts: list[Any] = [figure.chart.properties(width=640, height=280) for figure in figures]
    chart = alt.concat(*charts, columns=2, spacing=46).resolve_scale(color="independent", strokeDash="independent")
    return replace(figures[0], name="quick_analysis", chart=chart, caption=figures[0].caption)


def _present(opened: Catalog, where: Filter, names: tuple[str, ...]) -> list[str]:
    """The fields that divide the selection, and quant_type."""
    facets = opened.facets(where)
    return [name for name in names if name == "quant_type" or len(_chosen(where, name, facets)) > 1]


def _chosen(where: Filter, name: str, facets: dict[str, list[Any]]) -> list[Any]:
    """The values that occur in the selection itself: `facets` leaves each field's own restriction out."""
    wanted = getattr(where, name)
    return [value for value in facets.get(name, []) if not wanted or value in wanted]


def _lie(opened: Catalog, where: Filter, by: str, axis: str = "log2") -> Drawn:
    """Histogram, Q-Q plot and boxes of the groups of one field."""
    chosen = distribution.groups_of(opened, where, opened.rows_of([]), by)
    return distribution.values_lie(opened, where, None, chosen, axis, "normal")


def _distributions(opened: Catalog, where: Filter, lying: dict[str, Drawn]) -> Part:
    found: list[Plate] = []
    problems: list[str] = []
    for by, drawn in lying.items():
        found += plates("distributions", [f for f in drawn.figures if f.name != "boxes"], f"_{by}")
        problems += [f"By {TITLES[by].lower()}: {problem}" for problem in drawn.problems]
    linear = _lie(opened, where, "quant_type", "linear").get("histogram")
    found += plates("distributions", [linear] if linear else [], "_quant_type_linear")
    types = _chosen(where, "quant_type", opened.facets(where))
    if len(types) > 1:
        for name in types[:WITHIN]:
            histogram = _lie(opened, replace(where, quant_type=(name,)), "tensor_name").get("histogram")
            found += plates("distributions", [histogram] if histogram else [], f"_of_{_slug(name)}")
    text = (
        "Histograms of magnitudes (eighths of a binade) and Q–Q plots against a normal, by what divides the selection."
    )
    return Part("distributions", "Distributions", tuple(found), text=text, problems=tuple(problems))


def _slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:40] or "none"


def _heatmaps(opened: Catalog, where: Filter, formats: tuple[str, ...]) -> Part:
    found: list[Plate] = []
    for fmt in formats:
        for metric in ("sqnr_db", "flush_to_zero", "saturated"):
            drawn = depth.draw(Board(opened, where, format=fmt, measure=MEASURES[metric]), {})
            if metric == "saturated" and not _any(drawn):
                continue
            found += [Plate(f"heatmaps/{metric}_{fmt}", figure) for figure in drawn.figures]
    for metric in OF_VALUES:
        drawn = depth.draw(Board(opened, where, format="", measure=MEASURES[metric]), {})
        found += [Plate(f"heatmaps/{metric}", figure) for figure in drawn.figures]
    problems: list[str] = []
    for fmt in formats:
        plate, problem = _tokens(opened, where, fmt)
        found += [plate] if plate else []
        problems += [problem] if problem else []
    problems += [] if found else ["Nothing to draw: no selected tensor belongs to a layer."]
    text = "Every tensor by layer, bright where it is bad; then the worst tensor of each format, token by channel."
    return Part("heatmaps", "Heatmaps", tuple(found), text=text, problems=tuple(problems))


def _any(drawn: Drawn) -> bool:
    return any((figure.table["value"] > 0).any() for figure in drawn.figures)


def _tokens(opened: Catalog, where: Filter, fmt: str) -> tuple[Plate | None, str]:
    table = ranking_compute.ranking(opened, where, fmt, "sqnr_db")
    if table.empty:
        return None, ""
    selected, problem = _selected(opened, where, table.iloc[0]["tensor_id"], fmt)
    if selected is None:
        return None, problem
    figure = why.tokens(selected)
    if figure is None:
        return None, ""
    caption = f"{figure.caption}\nThe tensor with the lowest SQNR in {fmt}."
    return Plate(f"heatmaps/tokens_worst_{fmt}", replace(figure, caption=caption)), ""


def _selected(opened: Catalog, where: Filter, tensor_id: str, fmt: str) -> tuple[SelectedTensor | None, str]:
    """A tensor with its values, or what is missing."""
    rows = opened.rows_of([tensor_id])
    labels = full_labels(rows)
    try:
        x = opened.load(tensor_id)
    except (CatalogError, TensorFileError) as error:
        return None, f"{labels[tensor_id]}: its values are not to be had ({error})."
    return SelectedTensor(opened, where, row=rows.iloc[0], x=x, format=FORMATS[fmt], labels=labels), ""


def _comparisons(opened: Catalog, where: Filter, formats: tuple[str, ...]) -> Part:
    panels, operands = distribution.formats(opened, where, None)
    names = ("sqnr_db", "flush_to_zero", "saturated")
    found = [Plate(f"comparisons/formats_{name}", panel) for name, panel in zip(names, panels, strict=False)]
    tables = [Table("formats", "What each format does", panels[0].table, f"{operands:,} operands.")] if panels else []
    problems: list[str] = []
    for fmt in formats:
        for metric in ("sqnr_db", "flush_to_zero"):
            drawn = directions.draw(Board(opened, where, format=fmt, measure=MEASURES[metric]), {})
            for figure in drawn.figures:
                operation = figure.name.removeprefix("direction_")
                titled = _titled(figure, f"{MEASURES[metric].label} in {fmt}, {operation}")
                found.append(Plate(f"comparisons/{operation}_{metric}_{fmt}", titled))
    runs = runs_with_reference(recipes.runs_of(opened, where), opened.parts())
    verdict = ""
    if recipes.has_reference(runs):
        cost = recipes.cost(opened, where, runs)
        verdict = cost.verdict
        found += plates("comparisons", cost.figures)
        problems += cost.problems
        tables += [Table(name, "Loss against bf16’s", frame) for name, frame in cost.tables.items()]
        gradients = _gradients(opened, where, runs)
        found += [Plate(f"comparisons/gradients_{f.name}", f) for f in gradients.figures]
        problems += gradients.problems
    else:
        problems.append(recipes.no_reference(runs).replace("`", ""))
    if not panels:
        problems.append("No format comparison: only the operands of a GEMM are scored, and none is selected.")
    text = (
        "What each format would do to the selected operands, as scored when they were captured, forward beside "
        "backward; and each recipe’s loss and gradients against the bf16 run of the same data."
    )
    return Part("comparisons", "Comparisons", tuple(found), tuple(tables), text, verdict, tuple(problems))


def _titled(figure: Figure, text: str) -> Figure:
    """The figure under a title that tells what it is where it stands alone."""
    chart: Any = figure.chart
    title = chart.title.copy()
    title.text = text
    return replace(figure, chart=chart.properties(title=title))


def _gradients(opened: Catalog, where: Filter, runs: pd.DataFrame) -> Drawn:
    """Weight gradients of the first iteration, unless that would read too many values."""
    name = recipes.NAMES[0]
    iterations = recipes.iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    of = Filter(tensor_name=(name,), iteration=(iterations[0],))
    values = sum(
        int(opened.pairs(run["run_id"], run["reference"], of)["numel"].sum())
        for _, run in recipes.runs_compared(runs).iterrows()
    )
    if values > GRADIENT_VALUES:
        return Drawn(
            problems=(f"Gradients are not compared here: {big(values)} values would be read. The app does (Recipes).",)
        )
    compared = partial(recipes.compare, opened)
    return recipes.gradients(where, runs, name, iterations[0], iterations, compared)


def _statistics(opened: Catalog, where: Filter, formats: tuple[str, ...], lying: dict[str, Drawn]) -> Part:
    found: list[Plate] = []
    tables = [
        Table(
            f"statistics_{by}", f"By {TITLES[by].lower()}", distribution.moments(opened, where, opened.rows_of([]), by)
        )
        for by in _present(opened, where, STATISTICS_BY)
    ]
    for by, drawn in lying.items():
        found += plates("statistics", [f for f in drawn.figures if f.name == "boxes"], f"_{by}")
    verdicts = []
    for fmt in formats:
        ranked = ranking.draw(Board(opened, where, format=fmt, measure=MEASURES["sqnr_db"]), {})
        verdicts.append(f"{fmt}: {ranked.verdict}")
        found += [Plate(f"statistics/ranking_sqnr_db_{fmt}", figure) for figure in ranked.figures]
        tables += [
            Table(f"ranking_{fmt}", f"Worst in {fmt}", figure.table.head(MAX_WORST).drop(columns=["value"]))
            for figure in ranked.figures
        ]
        trained = training.draw(Board(opened, where, format=fmt, measure=MEASURES["sqnr_db"]), {})
        found += [Plate(f"statistics/training_sqnr_db_{fmt}", f) for f in trained.figures if f.name == "training"]
    for metric in OF_VALUES:
        ranked = ranking.draw(Board(opened, where, format="", measure=MEASURES[metric]), {})
        found += [Plate(f"statistics/ranking_{metric}", figure) for figure in ranked.figures]
    trained = training.draw(Board(opened, where, format="", measure=MEASURES["absmax"]), {})
    found += [Plate(f"statistics/{f.name if f.name == 'losses' else f'{f.name}_absmax'}", f) for f in trained.figures]
    text = "Moments over the finite values, ranked places, and how they change in training."
    return Part("statistics", "Statistics", tuple(found), tuple(tables), text, " ".join(verdicts[:1]))


def _hifp8(opened: Catalog, where: Filter, formats: tuple[str, ...]) -> Part:
    found = [Plate("hifp8/codebook", figure) for figure in [hifp8.codebook(opened, where)] if figure]
    for by in _present(opened, where, ("quant_type", "tensor_name", "module", "operation", "layer_index")):
        figure = hifp8.precisions(opened, where, by)
        found += [Plate(f"hifp8/{figure.name}", figure)] if figure else []
    problems, verdicts = [], []
    if "hifp8" in formats:
        table = ranking_compute.ranking(opened, where, "hifp8", "sqnr_db")
        chosen = pd.concat([part.head(LOOKED_AT // 2) for _, part in table.groupby("operation", sort=False)])
        for number, tensor_id in enumerate(chosen["tensor_id"].head(LOOKED_AT), 1):
            selected, problem = _selected(opened, where, tensor_id, "hifp8")
            if selected is None:
                problems.append(problem)
                continue
            drawn = codes.draw(selected, {})
            problems += drawn.problems
            verdicts.append(f"{selected.label}: {drawn.verdict}")
            found += plates("hifp8", drawn.figures, f"_{number}")
    else:
        problems.append("No operand was scored in hifp8: its codes are not counted.")
    text = (
        "HiFloat8 has no scale: the precision that a value gets is decided by its magnitude alone. "
        "All values, from sketches; then the codes that its worst tensors use, from their values."
    )
    return Part("hifp8", "HiFloat8", tuple(found), text=text, verdict=" ".join(verdicts[:1]), problems=tuple(problems))


def _attention(opened: Catalog, where: Filter) -> Part:
    rows = opened.tensors(replace(where, tensor_name=tuple(attention.NAMES)))
    wanted = where.tensor_name
    rows = rows[rows["path"].notna() & (rows["tensor_name"].isin(wanted) if wanted else True)]
    text = "Entropy, flushed probabilities and scores head by head, and the map of the most focused head."
    if rows.empty:
        problem = "No attention map with values is in the selection."
        return Part("attention_maps", "Attention maps", text=text, problems=(problem,))
    places = rows.sort_values(["iteration", "micro_batch", "rank", "run_id", "layer_index"], kind="stable")
    places = places.drop_duplicates(["run_id", "layer_index"])
    chosen = places.head(ATTENTION_PLACES)
    found: list[Plate] = []
    problems = []
    if len(places) > len(chosen):
        problems.append(f"{len(chosen)} of {len(places)} layers of runs are drawn: narrow the filter for others.")
    for number, row in enumerate(chosen.to_dict("records"), 1):
        fmt = row["quant_type"] if row["quant_type"] in FORMATS and row["quant_type"] != "bf16" else "hifp8"
        selected, problem = _selected(opened, where, row["tensor_id"], fmt)
        if selected is None:
            problems.append(problem)
            continue
        found += _maps(selected, f"_{number:02d}_{_slug(str(row['recipe']))}_L{int(row['layer_index'])}")
    return Part("attention_maps", "Attention maps", tuple(found), text=text, problems=tuple(problems))


def _answer(opened: Catalog, where: Filter, question: Question) -> Part:
    """A question as its page shows it, with the default parameters."""
    page = PAGES[question.page]
    assert page.params and page.draw
    given = {name: [text] for name, text in question.address.items()}
    drawn = page.draw(Selection(opened, where), read(page.params(opened), given)[0])
    name = _slug(question.title)
    tables = tuple(Table(_slug(title), title, table) for title, table in drawn.tables.items())
    found = plates(name, drawn.figures)
    return Part(name, question.title, found, tables, f"{question.text} {question.help}.", drawn.verdict, drawn.problems)


def _maps(selected: SelectedTensor, suffix: str) -> list[Plate]:
    maps = attention.maps_of(selected)
    if maps is None:
        return []
    by_head = attention.heads(selected, maps)
    head = 1
    if entropy := by_head.get("entropy"):
        head = int(entropy.table["head"].iloc[entropy.table["entropy"].fillna(1e9).argmin()])
    found = list(plates("attention_maps", by_head.figures, suffix))
    for name in maps.heads:
        figure = attention.head_map(maps, name, head, 1)
        found.append(Plate(f"attention_maps/{name.removeprefix('attention_')}_map{suffix}", figure))
    return found
