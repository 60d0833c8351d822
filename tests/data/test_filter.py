"""Filter: its SQL against pandas, its round trips, and what it makes of hostile input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS, INTEGER_FIELDS, Filter, FilterError
from tests.data.builder import assorted, make_run

HOSTILE = [
    "'; DROP TABLE tensor; --",
    "') OR 1=1 --",
    '"quoted"',
    "<script>alert(1)</script>",
    "{{7*7}} ${x} %s",
    "x" * 1_000_000,
    "",
    "\0",
    "日本 🦆 \u202e",
    "NULL",
    "*",
    "%",
]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("filtered")
    make_run(root, assorted(1), assorted(2, layer_index=2, module="qkv", rank=1), label="a")
    make_run(root, assorted(3, layer_type="attention", component="FA", iteration=5), label="b", model="other")
    with Catalog.open(root) as opened:
        yield opened


@pytest.fixture(scope="module")
def frame(catalog: Catalog) -> pd.DataFrame:
    """The rows as pyarrow reads them, without the index."""
    files = sorted(Path(catalog.root).glob("*/segments/*/tensor.parquet"))
    parts = [pd.read_parquet(file).assign(run_id=file.parts[-4]) for file in files]
    frame = pd.concat(parts, ignore_index=True)
    return frame.assign(tensor_id=frame["run_id"] + "/" + frame["tensor_id"])


def values_of(frame: pd.DataFrame, name: str) -> list:
    present = frame[name].dropna().unique().tolist()
    return [int(value) for value in present] if name in INTEGER_FIELDS else present


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_selects_what_pandas_selects(catalog, frame, data):
    chosen = {}
    for name in data.draw(st.lists(st.sampled_from(FIELDS), max_size=4, unique=True)):
        stranger = integers(name) if name in INTEGER_FIELDS else st.text(max_size=5)
        known = values_of(frame, name)
        values = st.one_of(st.sampled_from(known), stranger) if known else stranger
        chosen[name] = data.draw(st.lists(values, max_size=3))
    expected = frame
    for name, values in chosen.items():
        if values:
            expected = expected[expected[name].isin(values)]
    where = Filter(**chosen)
    found = catalog.tensors(where)
    assert sorted(found["tensor_id"]) == sorted(expected["tensor_id"])
    assert catalog.totals(where).tensors == len(expected)


def integers(name: str) -> st.SearchStrategy[int]:
    bits = 63 if name == "iteration" else 31
    return st.integers(-(2**bits), 2**bits - 1)


WORDS = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(integers(name) if name in INTEGER_FIELDS else st.text(), min_size=1, unique=True)
        for name in FIELDS
    },
)


@given(words=WORDS)
def test_round_trips(words):
    where = Filter(**words)
    assert where.to_dict() == words
    assert Filter.from_dict(where.to_dict()) == where
    assert Filter.from_query(where.to_query()) == (where, [])
    assert Filter(**{name: tuple(values) for name, values in words.items()}) == where
    assert hash(Filter.from_dict(words)) == hash(where)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
@pytest.mark.parametrize("name", ["run_id", "quant_type", "module"])
def test_hostile_text_is_only_a_value(catalog, value, name):
    before = catalog.totals()
    where = Filter(**{name: [value]})
    assert catalog.tensors(where).empty
    assert catalog.distribution(where).empty and catalog.moments(where).empty and catalog.scores(where).empty
    assert catalog.totals() == before
    condition, parameters = where.sql()
    assert condition == f"tensor.{name} IN (?)" and parameters == [value]
    assert Filter.from_query(where.to_query()) == (where, [])


@pytest.mark.parametrize(
    "given",
    [
        {"layer": [1]},
        {"1; DROP TABLE run": ["x"]},
        {1: [1], "b": [2]},
        {"model": "llama"},
        {"model": None},
        {"model": 3},
        {"model": [3]},
        {"model": [None]},
        {"model": b"ab"},
        {"model": [["a"]]},
        {"model": ["\ud800"]},
        {"layer_index": ["1"]},
        {"layer_index": [True]},
        {"layer_index": [1.0]},
        {"layer_index": [2**31]},
        {"layer_index": [-(2**31) - 1]},
        {"iteration": [2**63]},
        pytest.param({"layer_index": [10**5000]}, id="5000 digits"),
        {"layer_index": 1},
        {"layer_index": float("nan")},
        None,
        ["model"],
        "model",
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_wrong_values_are_refused(given):
    with pytest.raises(FilterError):
        Filter.from_dict(given)


def test_numpy_integers_are_taken(catalog, frame):
    where = Filter(layer_index=frame["layer_index"].unique(), iteration=[np.int64(0)])
    assert where == Filter(layer_index=[1, 2], iteration=[0])
    assert all(type(value) is int for value in where.layer_index)


def test_a_query_keeps_what_makes_sense():
    where, problems = Filter.from_query(
        {"layer_index": ["1", "two", "", "9" * 5000, "9" * 11], "module": ["fc1"], "page": ["2"], "model": ["\ud800"]}
    )
    assert where == Filter(layer_index=[1], module=["fc1"])
    assert len(problems) == 5
    assert all(len(problem) < 120 and problem.startswith("The URL asks for ") for problem in problems)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({}, "all tensors"),
        ({"layer_index": [1, 2], "operation": ["forward"]}, "layer 1 or 2, operation forward"),
        ({"operation": ["forward"], "run_id": ["a"]}, "run a, operation forward"),
        ({"tensor_name": ["query", "key", "value"]}, "tensor query, key or value"),
        ({"layer_index": [1, 2, 3, 4]}, "layer 1, 2, 3 or 4"),
        ({"layer_index": [1, 2, 3, 4, 5, 6]}, "layer 1, 2, 3 or 3 more"),
        ({"micro_batch": [0], "quant_type": ["mxfp8"]}, "quant type mxfp8, micro-batch 0"),
        ({"module": ["a", "a"]}, "module a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sentence(words, sentence):
    assert Filter(**words).sentence() == sentence


def test_without_frees_one_field():
    where = Filter(layer_index=[1], module=["fc1"])
    assert where.without("module") == Filter(layer_index=[1])
    assert where.without("rank") == where
