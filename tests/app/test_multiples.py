"""Small multiples: each panel holds the values of its combination, by numpy over the tensor files."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from vl_convert import vegalite_to_svg

from binade.app.figure import Drawn
from binade.app.view import View
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def drawn(catalog: Catalog, **values: str) -> Drawn:
    params = {"view": ["multiples"], **{name: [text] for name, text in values.items()}}
    return View("compare", params).draw(catalog)


def test_counts_are_those_of_the_files(catalog: Catalog):
    found = drawn(catalog, rows="layer_index", columns="module", color="operation", quant_type="bf16")
    table = found.figures[0].table
    groups = table.groupby(["rows", "columns", "color"])["count"].sum()
    iteration = catalog.distinct(("iteration",), Filter(quant_type=["bf16"]))["iteration"].max()
    rows = catalog.tensors(Filter(quant_type=["bf16"], iteration=[int(iteration)]))
    assert len(groups) == len(rows.groupby(["layer_index", "module", "operation"]))
    for (layer, module, operation), count in groups.items():
        own = rows[(rows["layer_index"] == layer) & (rows["module"] == module) & (rows["operation"] == operation)]
        nonzero = sum(int((catalog.load(name) != 0).sum()) for name in own["tensor_id"])
        assert count == nonzero


def test_quantiles_are_of_standardized_values(catalog: Catalog):
    where = {"tensor_name": "weight", "quant_type": "bf16", "layer_index": "1", "module": "fc1"}
    found = drawn(catalog, plot="qq", rows="module", columns="none", color="none", **where)
    table = found.figures[0].table.dropna(subset=["sample"])
    rows = catalog.tensors(Filter(tensor_name=["weight"], quant_type=["bf16"], layer_index=[1], module=["fc1"]))
    last = rows[rows["iteration"] == rows["iteration"].max()]
    x = np.concatenate([catalog.load(name).float().numpy().ravel() for name in last["tensor_id"]])
    middle = table[table["theoretical"].abs() < 1.5]
    share = 0.5 * (1 + np.vectorize(math.erf)(middle["theoretical"] / math.sqrt(2)))
    expected = np.quantile((x - x.mean()) / x.std(), share)
    np.testing.assert_allclose(middle["sample"], expected, atol=0.05)  # a bin of the sketch


@pytest.mark.parametrize("plot", ["histogram", "qq"])
@pytest.mark.parametrize("rows", ["none", "run_id", "iteration"])
def test_any_fields(catalog: Catalog, plot: str, rows: str):
    found = drawn(catalog, plot=plot, rows=rows, columns="none", color="none")
    assert len(found.figures) == 1 and not found.problems


def test_what_is_left_out_is_said(catalog: Catalog):
    found = drawn(catalog, rows="tensor_name", columns="none", color="none")
    names = catalog.distinct(("tensor_name",))["tensor_name"].nunique()
    assert names > 12 and found.problems == (f"Tensor: 12 of {names} are drawn.",)
    assert found.figures[0].table["rows"].nunique() == 12


@pytest.mark.parametrize("field", ["layer_index", "iteration"])
def test_rows_are_named_with_one_title_of_their_axis(catalog: Catalog, field: str):
    word, values = field.removesuffix("_index"), catalog.facets()[field]
    figure = drawn(catalog, plot="qq", rows=field).figures[0]
    svg = vegalite_to_svg(figure.spec | {"$schema": "https://vega.github.io/schema/vega-lite/v6.json"})
    labels = [text for text in re.findall(">([^<>]+)<", svg) if text.startswith(f"{word} ")]
    assert labels == [f"{word} {value}" for value in sorted(values)]
    assert svg.count(">quantile (σ)<") == 1 and svg.count('stroke-dasharray="5,4"') >= len(values)  # x = y in each
