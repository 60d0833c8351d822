import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from binade.data.run.tensor_kinds import TENSOR_KINDS
from binade.data.words.filter import Filter
from binade.data.words.names import distinct_names, name_of, short_names

ROW = {
    "tensor_id": "r/r00-000001", "run_id": "r", "layer_index": 1, "module": "fc1", "tensor_name": "input",
    "operation": "forward", "iteration": 0, "micro_batch": 0, "rank": 0, "expert": None, "phase": "pre", "stage": None,
    "recipe": "mxfp8",
}  # fmt: skip


def names(*changes, runs=None, long=False):
    rows = pd.DataFrame([ROW | {"tensor_id": f"r/{index}"} | change for index, change in enumerate(changes)])
    return list(distinct_names(rows, runs or {}, long=long).values())


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ((1, "fc2", "input"), "L1 fc2 input"),
        ((np.float64(12), "fc2", "grad_output"), "L12 fc2 grad output"),
        ((1, "core", "query"), "L1 QKᵀ query"),
        ((1, "core", "attention_scores"), "L1 QKᵀ scores"),
        ((1, "core", "grad_key"), "L1 QKᵀ grad key"),
        ((1, "core", "attention_probs"), "L1 PV probs"),
        ((1, "core", "grad_output"), "L1 PV grad output"),
        ((1, "core", "sink"), "L1 attention sink"),
        ((None, None, "logits"), "logits"),
        ((np.nan, "proj", pd.NA), "proj unnamed"),
        ((pd.NA, None, None), "unnamed"),
        ((3, "fc1", "weight", 7), "L3 fc1 expert 7 weight"),
        ((3, "QK"), "L3 QKᵀ"),
    ],
)
def test_a_tensor_has_a_short_name(row, name):
    assert name_of(*row) == name


def test_no_kind_of_tensor_is_named_by_the_attention_core():
    rows = pd.DataFrame({"tensor_name": [kind.name for kind in TENSOR_KINDS if kind.place == "attention"]})
    found = short_names(rows.assign(module="core"))
    assert found.str.fullmatch(r"(QKᵀ|PV) [a-z ]+").all() and found.is_unique


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}], ["L1 fc1 input"]),
        ([{}, {"layer_index": 2, "iteration": 5}], ["L1 fc1 input", "L2 fc1 input"]),
        ([{}, {"iteration": 5}], ["L1 fc1 input · iteration 0", "L1 fc1 input · iteration 5"]),
        ([{}, {"operation": "evaluation"}], ["L1 fc1 input · forward", "L1 fc1 input · evaluation"]),
        ([{}, {"micro_batch": 2}], ["L1 fc1 input · micro-batch 0", "L1 fc1 input · micro-batch 2"]),
        ([{"expert": 3}, {"expert": 4}], ["L1 fc1 input · expert 3", "L1 fc1 input · expert 4"]),
        ([{}, {"stage": "after"}], ["L1 fc1 input · no stage", "L1 fc1 input · stage after"]),
        ([{}, {"recipe": "bf16"}], ["L1 fc1 input · recipe mxfp8", "L1 fc1 input · recipe bf16"]),
        ([{}, {"run_id": "s"}], ["L1 fc1 input · run baseline", "L1 fc1 input · run s"]),
        ([{}, {}], ["L1 fc1 input · 0", "L1 fc1 input · 1"]),
    ],
)
def test_equal_names_get_what_tells_them_apart(changes, expected):
    assert names(*changes, runs={"r": "baseline"}) == expected


def test_a_long_name_has_the_operation():
    assert names({}, {"module": "core", "tensor_name": "grad_output", "operation": "backward"}, long=True) == [
        "L1 fc1 input · forward",
        "L1 PV grad output · backward",
    ]


def test_a_tensor_without_an_operation_has_no_empty_word():
    assert names({"operation": None, "tensor_name": None}, long=True) == ["L1 fc1 unnamed"]


@settings(max_examples=30)
@given(st.lists(st.tuples(*[st.integers(0, 1)] * 4), min_size=1, max_size=8), st.booleans())
def test_are_unique_whatever_differs(values, long):
    fields = ("iteration", "micro_batch", "rank", "layer_index")
    found = names(*(dict(zip(fields, value, strict=True)) for value in values), long=long)
    assert len(set(found)) == len(values)


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
def test_are_unique_over_a_whole_root(catalog, long):
    rows = catalog.tensors(Filter())
    found = distinct_names(rows, {}, long=long)
    assert list(found) == rows["tensor_id"].tolist() and len(set(found.values())) == len(rows)
