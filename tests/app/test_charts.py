"""The charts: valid, titled, with units, few marks, and one colour for a format on every one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import numpy as np
import pandas as pd
import pytest
import torch
import vl_convert
from altair.utils.data import to_values

from binade import quant
from binade.app.draw import style
from binade.app.draw.figure import Figure
from binade.app.questions.recipes import charts as recipe_charts
from binade.app.questions.runs import charts as run_charts
from binade.app.questions.shared import distribution_charts, distributions, event_marks, format_charts
from binade.app.questions.shared.quantile_plots import against_law, points_of
from binade.app.view.view import View
from binade.collector.recipes.recipe import TEN_RECIPES
from binade.data.compare.same_data import NATS
from binade.data.index.catalog import Catalog
from binade.data.run.events import Event, EventKind, append_event
from binade.data.run.losses import read_losses
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import TENSOR_SCHEMA
from tests.conftest import PROJECT, run_python

FORMATS = ["bf16", "hifp8", "mxfp8", "mxfp4"]
TENSORS = [f"L{i} fc1 input (forward, mxfp8)" for i in range(10)]


def found(groups: list[str]) -> list[distributions.Distribution]:
    random = torch.Generator().manual_seed(1)
    return [
        distributions.distribution_of(name, torch.randn(4000, generator=random).mul(2.0**i).bfloat16())
        for i, name in enumerate(groups)
    ]


def comparison(**columns: list[float]) -> pd.DataFrame:
    formats = ["hifp8", "mxfp8", "mxfp4", "nvfp4"]
    table = pd.DataFrame({"format": formats, "label": formats, "tensors": 3})
    usual = {"sqnr_db": [31.0, 30.0, 19.0, 20.0], "flush_to_zero": [0, 0.1, 0.2, 0], "saturated": [0, 0, 0, 0.5]}
    return table.assign(**usual | columns)


def losses(groups: list[str]) -> pd.DataFrame:
    table = pd.DataFrame([{"group": g, "iteration": i, "loss": 5.0 - i} for g in groups for i in range(-2, 3)])
    return table.assign(low=math.nan, high=math.nan)


def loss_chart(table: pd.DataFrame) -> alt.TopLevelMixin:
    return run_charts.losses(table, {}, pd.DataFrame(), NATS, logarithmic=False)


def histogram(each: list[distributions.Distribution], by: str) -> alt.TopLevelMixin:
    return distribution_charts.magnitudes(distributions.log2_histogram(each), by, "4 k values")


def qq(each: list[distributions.Distribution], by: str) -> alt.TopLevelMixin:
    look = distribution_charts.looks_of([d.group for d in each], by)
    points = points_of([against_law(d, "normal") for d in each])
    return distribution_charts.qq(points, "Q–Q", "a normal (σ)", subtitle="4 k values", fitted=True, **look)


def all_charts(groups: list[str], by: str = "quant type") -> dict[str, alt.TopLevelMixin]:
    each = found(groups)
    return {
        "log2": histogram(each, by),
        "qq": qq(each, by),
        "boxes": distribution_charts.boxes(distributions.boxes(each), "4 k values", by),
        "log2 boxes": distribution_charts.boxes(
            distributions.boxes([distributions.magnitudes(d) for d in each]), "4 k values", by, log2=True
        ),
        "losses": loss_chart(losses(groups).assign(low=1.0, high=9.0)),
    }


def walk(node: Any) -> Iterator[dict]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def spec(chart: alt.TopLevelMixin) -> dict:
    """The chart as the browser gets it; altair checks it against Vega-Lite's schema, json that there is no NaN."""
    made = chart.to_dict()
    return json.loads(json.dumps(made, allow_nan=False))


def encodings(made: dict) -> Iterator[tuple[str, dict]]:
    for node in walk(made):
        for channel, value in node.get("encoding", {}).items():
            for one in value if isinstance(value, list) else [value]:
                yield channel, one


def marks(made: dict) -> int:
    return sum(len(rows) for rows in made.get("datasets", {}).values())


def color_of(made: dict) -> dict[str, str]:
    found = {}
    for channel, encoding in encodings(made):
        if channel == "color":
            found |= dict(zip(encoding["scale"]["domain"], encoding["scale"]["range"], strict=True))
    return found


CASES = {"one": ["mxfp8"], "formats": FORMATS, "recipes": list(TEN_RECIPES), "tensors": TENSORS}


@pytest.fixture(scope="module", params=CASES)
def specs(request) -> dict[str, dict]:
    return {name: spec(chart) for name, chart in all_charts(CASES[request.param]).items()}


def test_titles_say_what_and_of_what(specs):
    for name, made in specs.items():
        assert made["title"]["text"], name
        assert made["title"]["subtitle"], name


def test_axes_have_titles_with_units(specs):
    """Every axis that measures something says what, and a magnitude or a deviation says in what."""
    for name, made in specs.items():
        titles = {channel: e["title"] for channel, e in encodings(made) if channel in "xy" and e.get("title")}
        assert set(titles) == ({"x"} if "boxes" in name else {"x", "y"}), name
        text = " ".join(titles.values())
        wanted = {"qq": "(σ)", "log2": "(binades)", "log2 boxes": "(binades)", "losses": "(nats per token)"}
        assert wanted.get(name, "value") in text, name


def test_nothing_shown_is_a_column_name(specs):
    raw = {name for name in TENSOR_SCHEMA.names if "_" in name} | {"low", "high", "share", "p0_1", "q1", "theoretical"}
    for name, made in specs.items():
        shown = [node["title"] for node in walk(made) if isinstance(node.get("title"), str)]
        shown += [made["title"]["text"], made["title"]["subtitle"]]
        for text in set(shown) - set(color_of(made)):  # runs, in the tooltip of their losses
            assert text not in raw and "_" not in text, (name, text)
        for channel, encoding in encodings(made):
            if channel == "tooltip":
                assert encoding.get("title"), (name, encoding)


def test_marks_are_few(specs):
    for name, made in specs.items():
        assert marks(made) <= 5000, (name, marks(made))


def test_marks_are_few_for_wide_tensors():
    wide = torch.exp2(torch.linspace(-140, 126, 4000))
    each = [distributions.distribution_of(name, wide * (1 + i / 16)) for i, name in enumerate(TENSORS)]
    assert marks(spec(histogram(each, "tensor"))) <= 5000
    assert marks(spec(distribution_charts.histogram(distributions.linear_histogram(each), "x", "value", False))) <= 5000
    assert marks(spec(qq(each, "tensor"))) <= 5000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("groups", CASES.values(), ids=list(CASES))
def test_a_group_has_one_colour_on_all_charts(groups):
    seen = [color_of(spec(chart)) for chart in all_charts(groups).values()]
    assert all(colors == seen[0] for colors in seen)


@pytest.mark.parametrize(
    "groups",
    [
        FORMATS,
        list(reversed(FORMATS)),
        [f"linear_{name}" for name in FORMATS[1:]],
        list(TEN_RECIPES),
        [f"L1 qkv input (forward, {name})" for name in FORMATS],
        [f"L1 qkv input (forward, {name}), iteration 3" for name in FORMATS],
        ["mxfp8 at 08:31:18 UTC", "mxfp8 at 08:40:00 UTC", "bf16 at 08:31:12 UTC"],
        ["mxfp8_e5m2", "mxfp8"],
    ],
    ids=lambda groups: groups[0],
)
def test_a_format_has_its_colour_wherever_it_is_named(groups):
    for group, color in zip(groups, style.colors(groups), strict=True):
        (name,) = [name for name in quant.FORMATS if style.format_in(group) == name]
        assert name in group and color == style.FORMAT_COLORS[name]


def test_events_are_rules_at_their_iterations(tmp_path):
    run = RunWriter.create(tmp_path, "mxfp8", {})
    for iteration, kind in ((2, EventKind.NON_FINITE), (1, EventKind.TRIGGER), (1, EventKind.CAPTURE)):
        append_event(run.directory, Event(kind, iteration, "dgrad is left", "t"))
    with Catalog.open(tmp_path) as opened:
        events = event_marks.marked_events(opened, {"mxfp8": run.run_id, "none": "missing"})
    table = losses(["mxfp8", "none"])
    made = spec(event_marks.marked(loss_chart(table), events, table["iteration"]))
    (drawn,) = [values for values in made["datasets"].values() if "kind" in values[0]]
    assert [(row["iteration"], row["kind"], row["group"]) for row in drawn] == [
        (1, "trigger", "mxfp8"), (2, "non-finite", "mxfp8"),
    ]  # fmt: skip
    rules, start, lines, *_ = made["layer"]
    assert [each["mark"]["type"] for each in (rules, start, lines)] == ["rule", "rule", "line"]
    assert rules["data"]["name"] in {name for name, rows in made["datasets"].items() if rows is drawn}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_vega_draws_losses_with_events(groups: int):
    names = [f"run {index}" for index in range(groups)]
    events = pd.DataFrame({"group": names, "iteration": 1, "kind": "trigger", "text": "low"})
    table = losses(names)
    made = spec(event_marks.marked(loss_chart(table), events, table["iteration"]))
    assert "<svg" in vl_convert.vegalite_to_svg(made)
    views = {view for param in made["params"] for view in param["views"]}
    assert views and all(f'"name": "{view}"' in json.dumps(made["layer"]) for view in views)


def test_a_chart_over_iterations_has_the_events_within_them():
    events = pd.DataFrame({"group": "mxfp8", "iteration": [-1, 3, 8, 9], "kind": "trigger", "text": "low"})
    table = pd.DataFrame({"iteration": [8, 0, 4], "value": 1.0})
    chart = alt.Chart(table, title="Title").mark_point().encode(x="iteration:Q", y="value:Q")
    made = spec(event_marks.marked(alt.layer(chart, chart.mark_line()), events, table["iteration"]))
    (drawn,) = [values for values in made["datasets"].values() if "kind" in values[0]]
    assert [row["iteration"] for row in drawn] == [3, 8]


def test_recipes_of_one_format_differ():
    made = spec(loss_chart(losses(list(TEN_RECIPES))))
    dashes = {
        group: tuple(dash)
        for channel, e in encodings(made)
        if channel == "strokeDash"
        for group, dash in zip(e["scale"]["domain"], e["scale"]["range"], strict=True)
    }
    looks = {(color, dashes[group]) for group, color in color_of(made).items()}
    assert len(looks) == len(TEN_RECIPES)


def test_a_long_name_is_not_taken_for_its_end():
    assert style.format_in("FA_linear_mxfp8_e5m2") == "mxfp8_e5m2"
    assert style.format_in("L1 fc1 input (forward, mxfp6_e2m3)") == "mxfp6_e2m3"
    assert style.format_in("20261121_083112_llama32-1b_bf16_beb4ff") is None
    assert style.format_in("L1 mxfp8s") is None


def test_groups_that_name_no_format_borrow_no_formats_colour():
    assert not set(style.RUN_COLORS) & set(style.FORMAT_COLORS.values())
    groups = [str(layer) for layer in range(1, 11)]
    assert len(set(style.colors(groups))) == len(groups)
    assert set(style.colors(TENSORS)) == set(style.PALETTE)


def test_every_format_has_a_colour_of_its_own():
    assert set(style.FORMAT_COLORS) == set(quant.FORMATS)
    everything = [*style.FORMAT_COLORS.values(), *style.PALETTE]
    assert len(set(everything)) == len(everything) and not set(style.SPARE) & set(style.PALETTE)


def luminance(color: str) -> float:
    """WCAG 2 relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("background", ["#ffffff", "#0f1219"], ids=["light", "dark"])
def test_every_colour_stands_out(background):
    """WCAG 2.1, 1.4.11: graphics need a contrast of 3 to 1."""
    for color in (*style.FORMAT_COLORS.values(), *style.RUN_COLORS, *style.SPARE, style.GREY):
        light, dark = sorted((luminance(color), luminance(background)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, color


class TestFormatPanels:
    def test_have_titles_units_and_figures(self):
        for panel, (_, name, unit, _) in zip(
            format_charts.trial_panels(comparison()), format_charts.ERROR_PANELS, strict=True
        ):
            made = spec(panel)
            assert made["title"]["text"] == name
            assert unit in [e.get("title") for channel, e in encodings(made) if channel == "x"]
            assert color_of(made) == {n: style.FORMAT_COLORS[n] for n in ("hifp8", "mxfp8", "mxfp4", "nvfp4")}

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize(
        ("value", "label"),
        [(math.inf, "no error"), (-math.inf, "overflows"), (math.nan, "no value"), (31.25, "31.2"), (-3.0, "−3.0")],
    )
    def test_any_value_has_a_label(self, value, label):
        made = spec(format_charts.trial_panels(comparison(sqnr_db=[value, 1.0, 2.0, 3.0]))[0])
        rows = [row for data in made["datasets"].values() for row in data if row.get("format") == "hifp8"]
        assert rows[0]["label"] == label

    def test_without_any_value(self):
        for panel in format_charts.trial_panels(comparison(sqnr_db=[math.nan] * 4)):
            spec(panel)


@pytest.mark.parametrize("name", ["a\\", 'a\\"', 'say "a"'])
def test_a_runs_name_may_hold_what_ends_a_string(name):
    table = pd.DataFrame({"label": ["b"], "run_id": ["b"], "iteration": [1], "loss": [1.0], "gap": [0.1]})
    table = table.assign(low=math.nan, high=math.nan, seeds=1, text="", outcome=None)
    for draw in (recipe_charts.gaps, recipe_charts.costs):
        assert vl_convert.vegalite_to_svg(draw(table, "", base=name).to_dict())


@pytest.mark.parametrize("values", [[math.nan, 3.0], [math.inf, 3.0], [1.0, 1.0]])
def test_losses_that_diverge(values):
    table = pd.DataFrame({"group": "mxfp4", "iteration": [0, 1], "loss": values, "low": math.nan, "high": math.nan})
    spec(loss_chart(table))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [0.0, -3e38, 1e-40])
def test_a_single_value_can_be_drawn(value):
    each = [distributions.distribution_of("bf16", torch.full((5,), value).bfloat16())]
    linear = distributions.linear_histogram(each)
    spec(distribution_charts.histogram(linear, "5 values", "value", False))
    spec(distribution_charts.boxes(distributions.boxes(each), "5 values", "quant type"))


def texts(chart: alt.TopLevelMixin, height: int) -> dict[str, float]:
    """The y of each text of a chart as drawn."""
    svg = ElementTree.fromstring(vl_convert.vegalite_to_svg(chart.properties(width=600, height=height).to_dict()))
    found = [(each.text, each.attrib["transform"]) for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    return {text: float(at.removesuffix(")").split(",")[1]) for text, at in found if text and "rotate" not in at}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ends", [[3.0] * 8, [3, 3.01, 3.02, 5, 5.01, 5.02, 5.03, 9], list(range(8)), [9, 0]])
def test_lines_have_their_names_at_their_ends_and_none_overlap(ends):
    groups = [f"run{index}" for index in range(len(ends))]
    table = pd.concat([losses(groups[:1]).assign(group=group) for group in groups])
    table.loc[table["iteration"] == 2, "loss"] = [float(end) for end in ends]
    chart = loss_chart(table)
    shown = texts(chart, 200)
    at = [shown[group] for group in sorted(groups, key=lambda group: -ends[groups.index(group)])]
    assert min(np.diff(at)) >= 12 and min(at) >= 0 and max(at) <= 200 + 12
    assert "run" not in shown  # the title of a legend


def test_many_lines_and_long_names_have_a_legend():
    for groups in ([f"run{index}" for index in range(9)], ["short", "a name too long to stand beside a line"]):
        drawn = json.dumps(spec(loss_chart(losses(groups))))
        assert '"symbolType": "stroke"' in drawn and "x2Offset" not in drawn


@pytest.mark.parametrize("length", [20, 40, 90])
def test_legends_have_room(length):
    """The height grows with the rows that a legend above the plot takes, so that it takes none from the plot."""
    groups = [f"{i}{'x' * length}" for i in range(10)]
    assert style.legend_height(groups[:1]) == 0
    assert style.legend_height(groups) >= 18 * math.ceil(10 / style.columns(groups))
    assert style.columns(groups) * (length * 7 + 44) <= style.LEGEND_WIDTH or style.columns(groups) == 1


def test_a_linear_axis_of_values_says_10():
    table = distributions.boxes([distributions.distribution_of("x", torch.linspace(-11, 11, 500))])
    chart = distribution_charts.boxes(table, "", "tensor")
    svg = vl_convert.vegalite_to_svg(Figure("boxes", chart, table, "").sized_spec(600))
    assert ">10</text>" in svg and "1e+1" not in svg


UNTOUCHED = """
import altair as alt
from altair.utils import schemapi

def attributes():
    return {(owner.__name__, name): value for owner in OWNERS for name, value in vars(owner).items()}

OWNERS = (schemapi, alt.SchemaBase, alt.TopLevelMixin, alt.Chart, alt.LayerChart, alt.data_transformers.__class__)
before = attributes()
import sys
from binade import Catalog, plots
with Catalog.open(sys.argv[1]) as catalog:
    assert plots.explore(catalog).figures[0].on_page
changed = [name for name, value in attributes().items() if before.get(name) is not value]
assert not changed, changed
assert alt.data_transformers.active == "default"
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_altair_stays_as_it_is_for_the_user(collected: Path, tmp_path: Path):
    (tmp_path / "untouched.py").write_text(UNTOUCHED)
    done = run_python(tmp_path / "untouched.py", collected, env={"PYTHONPATH": str(PROJECT)})
    assert done.returncode == 0, done.stderr[-2000:]


def test_rows_of_a_chart_are_those_that_altair_would_write():
    table = pd.DataFrame(
        {
            "float": [1.5, math.nan, math.inf, -math.inf],
            "half": np.array([0.5, 1.0, math.nan, 2.0], np.float32),
            "whole": [1, 2, 3, 2**60],
            "yes": [True, False, True, False],
            "text": ["a", None, "", "ü"],
            "mixed": [1, None, 2.5, 3],
            "list": [[1.0, 2.0], [], None, [3.0]],
        },
        index=pd.Index([3, 1, 2, 0], name="place"),
    )
    shown = Figure("a", alt.Chart(table).mark_bar().encode(x="float:Q"), table, "").spec["datasets"]
    assert list(shown.values()) == [to_values(table)["values"]]


def test_figures_drawn_by_two_threads_keep_their_own_data():
    """A page is drawn while a picture of another is exported."""
    table = pd.DataFrame({"value": range(1000)})
    figures = [Figure("a", alt.Chart(table + n).mark_bar().encode(x="value:Q"), table, "") for n in range(40)]
    pages, exported = figures[:20], figures[20:]
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: [each.on_page for each in pages])
        specs = [each.spec for each in exported]
    for each in specs:
        assert list(each["datasets"]) == [each["data"]["name"]]
    for n, each in enumerate(drawn.result()):
        assert each.tables["d0"]["columns"]["value"] == list(range(n, 1000 + n))


@pytest.mark.thorough
def test_the_runs_page_hides_warm_up_and_shows_it(catalog: Catalog):
    def table(**params: str) -> pd.DataFrame:
        drawn = View("runs", {name: [text] for name, text in params.items()}).draw(catalog)
        assert ("Warm-up is hidden." in drawn.figures[0].caption) == ("warmup" not in params)
        return drawn.figures[0].table

    records = sum(len(read_losses(catalog.root / run)) for run in catalog.runs()["run_id"])
    assert len(table(warmup="show")) == records > len(table()) and table()["iteration"].min() == 0
    assert np.isfinite(table(smooth="5")["mean"]).all() and "mean" not in table()


def test_a_long_name_keeps_its_end_in_axes_and_legends():
    """Runs often differ there only. Drawn with Vega, whose own limit cuts off ends."""
    names = [f"{'the same long beginning of a name ' * 2}seed {seed}" for seed in range(3)]
    each = [distributions.distribution_of(name, torch.randn(100)) for name in names]
    for chart in (
        distribution_charts.boxes(distributions.boxes(each), "x", "run"),
        histogram(each, "run"),
    ):
        svg = vl_convert.vegalite_to_svg(chart.properties(width=600, height=200).to_dict())
        shown = [text.text or "" for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        for seed in range(3):
            assert any(text.startswith("the same") and text.endswith(f"seed {seed}") for text in shown), shown
