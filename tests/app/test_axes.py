"""What a page calls the rows and columns of a tensor, and whether a tensor is an operand or a result of its GEMM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from binade import Recorder, instrument
from binade.app.view.view import View
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import OPERANDS, PRODUCT_KINDS
from binade.data.words.filter import Filter
from tests.app.planted import operand
from tests.data.builder import make_run

ATTENTION = {"layer_type": "attention", "module": "core", "component": "FA"}
QUERY = {"tensor_name": "query"} | ATTENTION
# (shape, words of the tensor, index of the one large value, its place as text); [2, 3, 8, 16] elsewhere in the run.
PLACES: dict[str, tuple[tuple[int, ...], dict[str, Any], tuple[int, ...], str]] = {
    "probs": ((1, 4, 8, 32), {"tensor_name": "attention_probs"} | ATTENTION, (0, 3, 1, 6), "token 1 of head 4, key 6"),
    "query": ((2, 3, 8, 16), QUERY, (1, 2, 5, 7), "token 5 of head 3, sequence 2, channel 7"),
    "heads_flat": ((6, 8, 16), QUERY, (4, 2, 7), "row 34, channel 7"),
    "weight": ((64, 64), {"tensor_name": "weight"}, (40, 49), "row 40, column 49"),
    "grad_weight": ((64, 64), {"tensor_name": "grad_weight"}, (40, 49), "row 40, column 49"),
    "batch_first": ((2, 8, 32), {}, (1, 5, 9), "token 5 of sequence 2, channel 9"),
    "sequence_first": ((8, 2, 32), {}, (5, 1, 9), "token 5 of sequence 2, channel 9"),
    "neither": ((4, 4, 32), {}, (3, 1, 9), "row 13, channel 9"),
    "one_sequence": ((1, 16, 32), {}, (0, 13, 9), "token 13, channel 9"),
    "flattened": ((16, 32), {}, (13, 9), "row 13, channel 9"),
    "of_expert": ((16, 32), {"expert": 3}, (13, 9), "row 13, channel 9"),
    "unknown": ((16, 32), {"tensor_name": "mine"}, (13, 9), "row 13, column 9"),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_value_with_most_of_the_error_is_named_by_its_place(tmp_path: Path, name: str):
    shape, words, at, place = PLACES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[at] = 4.9
    tensors = [operand(x, **words)]
    if name in ("batch_first", "sequence_first", "neither", "flattened", "of_expert"):
        tensors.append(operand(torch.randn(2, 3, 8, 16), layer=2, **QUERY))
    make_run(tmp_path, tensors)
    with Catalog.open(tmp_path) as catalog:
        ids = catalog.tensors(Filter(layer_index=[1]))["tensor_id"].tolist()
        verdict = str(View("tensor", {"tensor": ids, "format": ["mxfp4"]}).draw(catalog).verdict)
    found = re.search(r"The value 4\.9 of (.*) holds", verdict)
    assert found and found[1] == place


def test_a_token_of_a_matrix_of_one_sequence_keeps_its_index(tmp_path: Path):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[40, 49] = 4.9
    make_run(tmp_path, [operand(x)])
    with Catalog.open(tmp_path) as catalog:
        ids = catalog.tensors()["tensor_id"].tolist()
        drawn = View("tensor", {"tensor": ids, "format": ["mxfp4"]}).draw(catalog)
        assert "of token 40, channel 49 holds" in str(drawn.verdict)
        assert "by token and channel" in str(drawn.get("tokens").spec)
        make_run(tmp_path, [operand(x, layer=2, tensor_name="weight")])
        catalog.sync()
        ids = catalog.tensors(Filter(layer_index=[2]))["tensor_id"].tolist()
        drawn = View("tensor", {"tensor": ids, "format": ["mxfp4"]}).draw(catalog)
        texts = " ".join([str(drawn.verdict), *drawn.sentences, *(f"{f.spec} {f.caption}" for f in drawn.figures)])
        assert not re.search(r"\btokens?\b|\bchannels? \d", texts)


def test_no_result_is_called_an_operand(tmp_path: Path):
    """Each recorded tensor, on each page, is what the GEMM's own definition says."""
    model, tokens = GPTModel(MODELS["llama32-1b"]["tiny"]), torch.randint(257, (2, 33))
    model.initialize(0)
    recorder = Recorder(tmp_path, label="q", iterations=1)
    with recorder, instrument(model, "mxfp4", recorder):
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        recorder.step()
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors(Filter(layer_index=[1])).drop_duplicates(["layer_type", "tensor_name"])
        assert len(rows) > 15
        for row in rows.to_dict("records"):
            of_result = PRODUCT_KINDS[row["layer_type"], row["tensor_name"]].observed in OPERANDS
            role = f"{'result' if of_result else 'operand'} of {row['gemm']}"
            for view in ("why", "blocks"):
                tensor = View("tensor", {"view": [view], "tensor": [row["tensor_id"]], "format": ["mxfp4"]})
                assert f", {role}, " in tensor.draw(catalog).figures[0].caption
        problem = View("tensor", {"tensor": [rows[rows["tensor_name"] == "output"]["tensor_id"].iloc[0]],
                                  "format": ["mxfp4"], "gemm": ["wgrad"]}).draw(catalog).problems[0]  # fmt: skip
        assert "is a result of forward, and not of wgrad" in problem
        results = View("map", {"metric": ["result_sqnr_db"]}).draw(catalog)
        assert "Operand" not in [
            column.title for item in results.items for column in getattr(item, "columns", {}).values()
        ]
