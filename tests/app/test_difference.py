"""The question of where two runs differ, on the collected runs."""

from __future__ import annotations

import pytest

from binade import plots
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def test_two_recipes_and_one_run_twice(catalog: Catalog):
    runs = dict(zip(catalog.runs()["recipe"], catalog.runs()["run_id"], strict=True))
    found = plots.difference(
        catalog, Filter(iteration=[0]), run_a=runs["bf16"], run_b=runs["mxfp4"], tolerance="bitwise"
    )
    table = found.tables["differences"]
    assert "L1 qkv output (forward, post)" in found.verdict  # the first result of operands that are rounded
    assert set(table["iteration"]) == {0} and table["order"].is_monotonic_increasing
    assert table.set_index("place")["difference"].iloc[0] == 0
    assert "recipe (bf16, mxfp4)" in found.problems[0]
    formats = found.tables["formats"]
    assert {*formats["a"]} == {"bf16"} and {*formats["b"]} == {"mxfp4"} and "qkv" in formats["place"].iloc[0]
    spec = found.charts[0].to_dict()
    assert len(next(iter(spec["datasets"].values()))) and found.figures[0].choose == "tensor_id"
    same = plots.difference(catalog, run_a=runs["bf16"], run_b=runs["bf16"])
    assert same.problems == ("Choose two runs of the same model and data.",)
    none = plots.difference(catalog, Filter(quant_type=["mxfp4"]), run_a=runs["bf16"], run_b=runs["mxfp4"])
    assert none.problems[-1] == "The two runs have none of the filter's tensors in common."


@pytest.mark.thorough
@pytest.mark.slow
def test_the_page(visit, collected):
    at = visit(collected, "runs", view="difference", tolerance="0.1")
    assert {"Run A", "Run B"} <= {box.label for box in at.selectbox}
    assert any("differs by more than 0.1" in text.value for text in at.markdown)
