"""The catalog's aggregated answers, against the same done by pandas and numpy over its plain rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from binade.collector.settings import DEFAULT_SCORES
from binade.data.index.catalog import STATISTICS, Catalog, CatalogError
from binade.data.words.filter import Filter
from binade.quant.metrics import compare

PLACE = ("layer_index", "module", "operation", "tensor_name")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "hifp8"])
@pytest.mark.parametrize("worst", ["sqnr_db", "flush_to_zero", "saturated"])
def test_errors_are_quantiles_of_the_scores(catalog, fmt, worst):
    where = Filter(quant_type=["bf16", "mxfp4"])
    found = catalog.errors(fmt, PLACE, where, worst).set_index(list(PLACE))
    scores = catalog.scores(where)
    scores = scores[scores["format"] == fmt]
    groups = scores.groupby(list(PLACE))
    assert len(found) == len(groups) > 10
    for place, part in groups:
        row = found.loc[place]
        for name in ("sqnr_db", "flush_to_zero", "saturated"):
            expected = np.quantile(part[name].dropna(), [0.1, 0.5, 0.9])
            assert [row[f"{name}_low"], row[name], row[f"{name}_high"]] == pytest.approx(expected, rel=1e-12), name
        assert row["tensors"] == len(part)
        values = part.set_index("tensor_id")[worst]
        assert values[row["tensor_id"]] == (values.min() if worst == "sqnr_db" else values.max())


def test_another_run_changes_no_number_of_a_run(catalog):
    runs = catalog.runs()["run_id"].tolist()
    alone = catalog.restricted(runs[:1])
    for by in (PLACE, ("operation",), ("layer_index", "iteration")):
        found = catalog.errors("mxfp4", ("run_id", *by)).query("run_id == @runs[0]").drop(columns="run_id")
        pd.testing.assert_frame_equal(found.reset_index(drop=True), alone.errors("mxfp4", by))


def statistic(catalog: Catalog, metric: str) -> pd.Series:
    """A statistic of each tensor, as it is defined for the Map."""
    found = catalog.ask(f"SELECT tensor_id, {STATISTICS[metric]} AS value FROM tensor")
    return found.set_index("tensor_id")["value"]


@pytest.mark.parametrize("metric", STATISTICS)
def test_statistics_are_those_of_the_tensors(catalog, metric):
    found = statistic(catalog, metric)
    rows = catalog.tensors()
    rows["crest_factor"], rows["zero_share"] = rows["absmax"] / rows["rms"], rows["zeros"] / rows["numel"]
    rows["non_finite"] = (rows["nans"] + rows["infs"]) / rows["numel"]
    rows["dynamic_range"] = np.log2(rows["absmax"] / rows["absmin"])
    expected = rows.set_index("tensor_id")[metric]
    assert found[expected.index].to_numpy(float) == pytest.approx(expected.to_numpy(float), rel=1e-12, nan_ok=True)


def test_the_same_definition_as_the_metrics(catalog):
    row = catalog.tensors(Filter(quant_type=["mxfp8"], tensor_name=["query"])).iloc[0]
    x = catalog.load(row["tensor_id"])
    values = compare(x, x)
    for metric in ("kurtosis", "crest_factor", "dynamic_range"):
        found = statistic(catalog, metric)[row["tensor_id"]]
        assert found == pytest.approx(values[metric], rel=1e-9)


def test_twins_are_the_same_tensor_of_each_run(catalog):
    rows = catalog.tensors(Filter(quant_type=["mxfp4"], iteration=[1]))
    for tensor_id in rows["tensor_id"].iloc[[0, 7, -1]]:
        found = catalog.twins(tensor_id)
        assert sorted(found["recipe"]) == ["bf16", "hifp8", "mxfp4", "mxfp8"]
        own = found[found["tensor_id"] == tensor_id].iloc[0]
        for name in (*PLACE, "iteration", "phase", "model"):
            assert (found[name] == own[name]).all()
    assert catalog.twins("no/such").empty


def test_pairs_hold_every_tensor_once(catalog):
    runs = catalog.runs().set_index("recipe")["run_id"]
    where = Filter(tensor_name=["grad_weight"])
    found = catalog.pairs(runs["mxfp4"], runs["bf16"], where)
    own = catalog.tensors(Filter(run_id=[runs["mxfp4"]], tensor_name=["grad_weight"]))
    assert sorted(found["tensor_id"]) == sorted(own["tensor_id"])
    other = catalog.tensors(Filter(run_id=[runs["bf16"]])).set_index("tensor_id")
    for _, row in found.iterrows():
        twin = other.loc[row["reference_id"]]
        assert [twin[name] for name in ("layer_index", "module", "tensor_name", "iteration")] == [
            row[name] for name in ("layer_index", "module", "tensor_name", "iteration")
        ]


def test_parts_are_what_was_rounded(catalog):
    runs = catalog.runs().set_index("run_id")["recipe"]
    found = catalog.parts().assign(recipe=lambda table: table["run_id"].map(runs)).set_index(["recipe", "part"])
    assert set(found.index) == {(name, part) for name in ("hifp8", "mxfp8", "mxfp4") for part in ("QK", "PV", "linear")}
    assert found.loc[("mxfp8", "linear"), "format"] == "mxfp8"
    assert set(found.loc["mxfp8", "gradient_format"]) == {"mxfp8_e5m2"}


def test_rows_of_keeps_the_order(catalog):
    ids = catalog.tensors()["tensor_id"].tolist()
    wanted = [ids[30], ids[2], ids[70]]
    assert catalog.rows_of([wanted[0], "no/such", *wanted[1:]])["tensor_id"].tolist() == wanted
    assert catalog.rows_of([]).empty


def test_scored_formats(catalog):
    assert set(catalog.scored_formats()) == {*DEFAULT_SCORES, "mxfp8_e5m2"}  # what mxfp8 rounds gradients to
    assert catalog.scored_formats(Filter(phase=["post"], layer_type=["linear"])) == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.errors("mxfp4", ("loss; DROP TABLE run",)),
        lambda c: c.errors("mxfp4", PLACE, worst="mse"),
        lambda c: c.errors("mxfp4", ("path",)),
        lambda c: c.table("segment"),
    ],
)
def test_says_what_cannot_be_asked(catalog, ask):
    with pytest.raises(CatalogError, match=r"column|by|statistic|table|ranked"):
        ask(catalog)
