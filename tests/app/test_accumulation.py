"""A result that is computed again from its operands on disk, against the whole product of the public quantizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from binade import quant
from binade.app.draw.figure import Text
from binade.app.measures import accumulation, results
from binade.app.measures.map_measure import CellQuery
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.quant.specs import Spec
from tests.app.roots import copy
from tests.bench.bench_accumulation import of_recorded

MXFP8 = {"quant_type": ["mxfp8"], "layer_index": [2], "module": ["fc1"], "iteration": [1]}
SIDES = {
    "output": (("input", -1, "mxfp8"), ("weight", -1, "mxfp8")),
    "grad_input": (("grad_output", -1, "mxfp8_e5m2"), ("weight", 0, "mxfp8")),
    "grad_weight": (("grad_output", 0, "mxfp8_e5m2"), ("input", 0, "mxfp8")),
}
SCALED_BY_32 = ["as recorded, all values", "exact", "float32", "Blackwell (B200)"]


def row_of(catalog: Catalog, name: str, **where):
    return catalog.tensors(Filter(tensor_name=[name], **(where or MXFP8))).iloc[0]


def rows(x: torch.Tensor, axis: int) -> torch.Tensor:
    """At most 64 rows, along the axis that is contracted."""
    x = x.double() if axis else x.double().T
    return x[:: -(-len(x) // 64)]


@pytest.mark.parametrize("name", SIDES)
def test_the_errors_of_a_result(catalog, name):
    recorded = row_of(catalog, name)
    table, what, unfit = accumulation.accumulated(catalog, recorded["tensor_id"])
    exact, rounded = [], []
    for operand, axis, spec in SIDES[name]:
        x = catalog.load(row_of(catalog, operand)["tensor_id"]).flatten(0, -2)
        exact.append(rows(x, axis))
        rounded.append(rows(quant.fake_quantize(x.float(), spec, axis), axis))
    truth, got = exact[0] @ exact[1].T, rounded[0] @ rounded[1].T
    want = 10 * math.log10(truth.square().sum() / (got - truth).square().sum())
    assert table["title"].tolist() == SCALED_BY_32
    assert table["result_db"].tolist() == pytest.approx([recorded["result_sqnr_db"], *[want] * 3], abs=1e-3)
    assert table["sums_db"][1] == np.inf and (table["sums_db"][2:] > 120).all()
    assert len(unfit) == 4 and what.startswith(f"{len(truth)} of ") and "64 columns" not in what


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SIDES)
def test_all_of_a_result(catalog, name, monkeypatch):
    """The SQNR is the one that was recorded in training, which multiplied in bfloat16."""
    monkeypatch.setattr(accumulation, "SAMPLE", 1 << 20)
    table, *_ = accumulation.accumulated(catalog, row_of(catalog, name)["tensor_id"])
    assert table["result_db"][1] == pytest.approx(table["result_db"][0], abs=0.1)


@pytest.mark.parametrize(
    "spec", ["fp8_e4m3", "fp8_e4m3(block=row)", "fp8_e4m3(block=1x128)", "fp8_e5m2(block=128x128)"]
)
def test_lines_have_the_scales_of_the_whole_tensor(spec):
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)) * torch.arange(300)[:, None]
    found = accumulation.lines(x, Spec.of(spec))
    assert torch.equal(found.exact, x[::5])
    torch.testing.assert_close(found.rounded.float(), quant.fake_quantize(x, spec)[::5], rtol=2.0**-22, atol=0)


def test_a_chosen_cell_adds_a_table(catalog):
    view = View("map", {"metric": ["result_sqnr_db"], "recipe": ["mxfp8"]})
    answer = view.draw(catalog)
    assert "accumulation" not in answer.tables and "Click a cell" in answer.items[1].text
    answer = view.changed(cell="dgrad/fc1/grad_input/2").draw(catalog)
    table = answer.items[1]
    assert answer.tables["accumulation"]["title"].tolist() == SCALED_BY_32
    assert "mxfp8_e5m2 and mxfp8" in table.note and "grad input" in table.title


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"quant_type": ["mxfp4"], "module": ["fc1"], "tensor_name": ["output"]}, "E4M3 or E5M2"),
        ({"quant_type": ["mxfp8"], "module": ["core"], "tensor_name": ["grad_query"]}, "linear layer"),
        ({"quant_type": ["bf16"], "module": ["fc1"], "tensor_name": ["output"]}, "both operands were rounded"),
    ],
)
def test_why_there_is_no_table(catalog, where, reason):
    said = results.accumulation(CellQuery(catalog, Filter()), catalog.tensors(Filter(**where)).iloc[0])
    assert isinstance(said, Text) and reason in said.text


def test_a_block_with_nan_is_no_reason():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[1, 3] = torch.nan
    found = accumulation.lines(x, Spec.of("mxfp8"))
    assert accumulation.compared(found, found)[0]["title"].tolist() == SCALED_BY_32[1:]


@pytest.mark.thorough
def test_values_that_are_gone(collected, tmp_path):
    with Catalog.open(copy(collected, tmp_path / "runs")) as catalog:
        catalog.path(row_of(catalog, "weight")["tensor_id"]).unlink()
        with pytest.raises(accumulation.MissingError, match=r"operand weight cannot be read: .* is missing"):
            accumulation.accumulated(catalog, row_of(catalog, "output")["tensor_id"])
        assert len(accumulation.accumulated(catalog, row_of(catalog, "grad_weight")["tensor_id"])[0]) == len(
            SCALED_BY_32
        )
        counts = {gemm: count for recipe, gemm, count, *_ in of_recorded(catalog.root) if recipe == "mxfp8"}
        assert counts["wgrad"] == "8 of 8 results" and counts["forward"] == "7 of 8 results"
