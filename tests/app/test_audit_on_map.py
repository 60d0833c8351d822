"""The Map of an audit: the errors of the weights against the original, as the audit measured them."""

from __future__ import annotations

import pytest

import binade
from binade.app.measures.map_measure import CellQuery
from binade.app.measures.registry import MAP_MEASURES
from binade.data.index.catalog import USED, Catalog
from tests.data.test_quantized import CHECKPOINTS


@pytest.mark.parametrize("name", ["compressed_tensors_mxfp4", "autoawq", "gptq", "bitsandbytes_nf4", "torchao_int8"])
def test_the_map_has_the_error_of_each_weight_that_the_audit_measured(name, tmp_path):
    audit = binade.audit(CHECKPOINTS / name, CHECKPOINTS / "original", tmp_path)
    with Catalog.open(tmp_path) as catalog:
        cells = MAP_MEASURES["sqnr_db"].cells(CellQuery(catalog, binade.Filter(), USED))
    found = {row["product"]: row["value"] for row in cells.to_dict("records") if row["tensor"] == "weight"}
    measured = {weight.name: weight.error for weight in audit.weights}
    for product, module in {"fc2": "mlp.down_proj", "proj": "self_attn.o_proj"}.items():
        error = measured[f"model.layers.0.{module}.weight"]
        assert error is not None and found[product] == pytest.approx(error.sqnr_db, abs=1e-9)


def test_weights_without_a_spec_have_no_error_of_normal_values_and_the_page_says_where_theirs_is(visit, tmp_path):
    audit = binade.audit(CHECKPOINTS / "autoawq", CHECKPOINTS / "original", tmp_path)
    quantized = sum(weight.error is not None for weight in audit.weights)
    app = visit(tmp_path, "map")
    text = " ".join(element.value for element in (*app.markdown, *app.info, *app.caption))
    assert (
        f"{quantized} weights differ from the original" in text
        and "choose “as used” as format and SQNR as color" in text
    )
    app = visit(tmp_path, "map", metric="sqnr_db", format="used")
    assert not app.exception and not app.info


def test_the_pages_of_an_audit_open(visit, tmp_path):
    """The Map says how many weights have an error; the others answer without a training's losses or iterations."""
    audit = binade.audit(CHECKPOINTS / "modelopt_nvfp4", CHECKPOINTS / "original", tmp_path)
    matched = sum(weight.match is not None for weight in audit.weights)
    assert any(f"{matched} operands · 1 run" in caption.value for caption in visit(tmp_path, "map").caption)
    for page in ("explore", "runs", "recipes"):
        visit(tmp_path, page)
