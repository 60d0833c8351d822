"""The question of where two runs differ, on the collected runs."""

from __future__ import annotations

import re

import pytest
import torch

from binade import plots
from binade.collector.imports import importer
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.collector.logs_made import read_here
from tests.collector.test_import_tools import msprobe, run, sglang


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
@pytest.mark.parametrize("change", ["", "model.layers.2.mlp.down_proj"], ids=["dtype", "layer"])
def test_of_imported_dumps_the_page_says_what_binade_diff_says(command, capsys, tmp_path, monkeypatch, change: str):
    """float32 in training, bfloat16 in inference: 2⁻⁵ is below what the dtypes explain of some tensors."""
    monkeypatch.setattr(importer, "scatter", read_here)
    runs = []
    for write, calls in ((msprobe, run(torch.float32)), (sglang, run(torch.bfloat16, change))):
        write(tmp_path / write.__name__, calls)
        assert command("import", str(tmp_path / write.__name__), "--scores", "", "--workers", "1") == 0
        runs += re.findall(r"^(\w+): \d", capsys.readouterr().out, re.MULTILINE)
    assert command("diff", *runs) == bool(change)
    printed = capsys.readouterr().out.splitlines()
    with Catalog.open(tmp_path / "runs") as catalog:
        found = plots.difference(catalog, run_a=runs[0], run_b=runs[1])
        strict = plots.difference(catalog, run_a=runs[0], run_b=runs[1], tolerance="0.0001")
    assert found.verdict.headline in printed and "by more than their dtypes explain" in found.verdict.headline
    assert ("L3 fc2 output" in found.verdict.headline) == bool(change)
    limits = found.tables["differences"]["limit"]
    assert limits.is_monotonic_increasing and limits.min() >= 2**-7
    assert "by more than 0.0001" in strict.verdict.headline


@pytest.mark.slow
def test_the_page(visit, collected):
    at = visit(collected, "runs", view="difference", tolerance="0.1")
    assert {"Run A", "Run B"} <= {box.label for box in at.selectbox}
    assert any("by more than 0.1; first difference" in text.value for text in at.markdown)
