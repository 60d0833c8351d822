"""Notebook › SQL: the links of a row, and the chart of the columns of a result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from vl_convert import vegalite_to_svg

from binade.app.pages import sql_chart, sql_page
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.app.test_pages import Visit, chart_data, charts, words

HOSTILE = ("<b>bold</b>", "a.b[0]", 'it\'s "quoted"', "\\", "datum['x']")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_column_of_any_name_is_drawn(name: str):
    """With the values of the column, and its name as it is written."""
    rows = pd.DataFrame({name: [1.5, 2.5, -3.0], "x": [1, 2, 3], f"{name}.": ["u", "v", name]})
    figure = sql_chart.figure(rows, "x", name, f"{name}.", "SELECT 1")
    (data,) = figure.spec["datasets"].values()
    assert [row["y"] for row in data] == [1.5, 2.5, -3.0] and [row["group"] for row in data] == ["u", "v", name]
    assert figure.csv().splitlines()[-3].startswith("1,1.5") and figure.table.columns.tolist() == [
        "x",
        name,
        f"{name}.",
    ]
    for drawn in (figure, sql_chart.figure(rows, f"{name}.", name, None, "")):
        svg = vegalite_to_svg(drawn.spec | {"$schema": "https://vega.github.io/schema/vega-lite/v6.json"})
        assert svg.count('aria-roledescription="point"') + svg.count('aria-roledescription="bar"') == 3
        assert "undefined" not in svg and "<b>" not in svg


@pytest.mark.parametrize(
    ("x", "color", "mark", "kind"),
    [
        (["a", "b", "c", "d"], None, "bar", "nominal"),
        (["a", "a", "b", "b"], [1, 2, 1, 2], "bar", "nominal"),
        (["a", "a", "b", "b"], None, "point", "nominal"),
        ([True, False, None, None], [0, 0, 1, 2], "bar", "nominal"),
        ([4, 3, 2, 1], None, "line", "quantitative"),
        ([1, 1, 2, 2], None, "point", "quantitative"),
        ([1, 1, 2, 2], ["u", "v", "u", None], "line", "quantitative"),
        (pd.date_range("2026-01-01", periods=4), None, "line", "temporal"),
    ],
)
def test_the_mark_fits_the_columns(x: list, color: list | None, mark: str, kind: str):
    rows = pd.DataFrame({"x": x, "y": [1.0, np.nan, 2.0, np.inf]} | ({"color": color} if color else {}))
    rows.loc[[1, 3], "y"] = 3.0
    spec = sql_chart.figure(rows, "x", "y", "color" if color else None, "").spec
    assert spec["mark"]["type"] == mark and spec["encoding"]["x"]["type"] == kind


def test_what_cannot_be_drawn_is_left_out_and_counted():
    rows = pd.DataFrame({"layer": [10, 9, 2, 1], "y": [1.0, np.nan, 2.0, np.inf]})
    figure = sql_chart.figure(rows, "layer", "y", "layer", "")
    assert figure.spec["title"]["subtitle"] == "4 rows, 2 without a finite y"
    assert figure.spec["encoding"]["color"]["scale"]["domain"] == ["2", "10"]  # in the order of numbers
    nothing = sql_chart.figure(rows.assign(y=np.nan, name="a"), "name", "y", "layer", "").spec
    assert nothing["title"]["subtitle"] == "4 rows, 4 without a finite y" and nothing["mark"]["type"] == "bar"


@pytest.mark.slow
def test_the_page_draws_the_columns_of_its_address(visit: Visit, collected: Path):
    sql = 'SELECT module AS "<b>", max(absmax) AS "a.b[0]" FROM tensor GROUP BY ALL ORDER BY 1'
    at = visit(collected, "sql", q=sql)
    assert charts(at) == 0 and at.selectbox(key="y").options == ["none", "a.b[0]"]
    at.selectbox(key="x").set_value("<b>")
    at.selectbox(key="y").set_value("a.b[0]").run()
    assert not at.exception and charts(at) == 1
    assert at.query_params["x"] in ("<b>", ["<b>"])
    spec = json.loads(chart_data(at)[0]["spec"])
    assert spec["encoding"]["y"]["title"] == "a.b[0]" and spec["mark"]["type"] == "bar"
    again = visit(collected, "sql", q=sql, x="<b>", y="gone")
    assert charts(again) == 0 and "no column 'gone'" in words(again)
    assert not visit(collected, "sql", q="SELECT 'a' AS module").selectbox


@pytest.mark.thorough
def test_an_operand_is_opened_at_its_cell_of_the_map(catalog: Catalog):
    rows = catalog.tensors(Filter(quant_type=["mxfp4"], tensor_name=["weight", "query"]))
    for _, row in rows.iterrows():
        view = sql_page._in_map(catalog, row)
        reading = view.read(catalog)
        assert reading.where.run_id == (row["run_id"],) and reading.where.iteration == (row["iteration"],)
        gemm, product, tensor, layer = view.params["cell"][0].split("/")
        assert (tensor, layer) == (row["tensor_name"], str(row["layer_index"]))
        assert gemm == "forward" and product == {"core": "QK"}.get(row["module"], row["module"])
    result = catalog.tensors(Filter(tensor_name=["output"]), limit=1).iloc[0]
    assert "cell" not in sql_page._in_map(catalog, result).params
