"""Formats of operands compared: grouped as few as they can be, and again the same operands when written out."""

from __future__ import annotations

from itertools import product

from binade.data.compare.coverage import CoveredOperand, differing
from binade.data.words.text import spans


def test_the_groups_are_few_and_exact():
    a = {
        CoveredOperand(layer, module, None, tensor, gemm): "mxfp4" if (layer < 5 and module == "fc2") else "bf16"
        for layer, module in product(range(1, 9), ("fc1", "fc2"))
        for tensor, gemm in (("input", "forward"), ("input", "wgrad"), ("weight", "forward"))
    }
    b = dict.fromkeys(a, "bf16")
    assert not differing(a, a)
    assert [str(each) for each in differing(a, b)] == [
        "layers 1-4 fc2 input (forward, wgrad): mxfp4 | bf16",
        "layers 1-4 fc2 weight (forward): mxfp4 | bf16",
    ]
    del b[CoveredOperand(7, "fc1", None, "weight", "forward")]
    b[CoveredOperand(2, "fc2", 3, "input", "forward")] = "mxfp8"
    texts = [str(each) for each in differing(a, b)]
    assert "layer 7 fc1 weight (forward): bf16 | not recorded" in texts
    assert "layer 2 expert 3 fc2 input (forward): not recorded | mxfp8" in texts
    assert spans([1, 2, 3, 7]) == "1-3, 7"


def test_an_operand_whose_format_is_unknown_is_not_compared():
    operand = CoveredOperand(1, "fc1", None, "input", "wgrad")
    assert not differing({operand: ""}, {operand: "mxfp8"})
