"""Fields against the schema of the index, and numbers against Python's decimal arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from binade.data.run.segment import TABLES, TENSOR_SCHEMA
from binade.data.words.fields import ERRORS, FIELDS, IDENTITIES, MEASURES
from binade.data.words.filter import FIELDS as FILTERED
from binade.data.words.text import number_text
from binade.quant.definitions import METRICS
from tests.numbers import read


def test_the_fields_of_the_filter_are_columns_of_their_type():
    assert set(IDENTITIES) == set(FILTERED)
    types = {name: TENSOR_SCHEMA.field(name).type for name in IDENTITIES if name in TENSOR_SCHEMA.names}
    assert len(types) >= 11
    assert {name: pa.types.is_integer(kind) for name, kind in types.items()} == {
        name: IDENTITIES[name].is_integer for name in types
    }


def test_errors_are_columns_of_the_scores():
    assert set(ERRORS) <= set(TABLES["score"].names)


def test_every_metric_has_a_field_with_its_definition():
    assert {name: (one.label, one.unit, one.definition) for name, one in METRICS.items()} == {
        name: (FIELDS[name].title, FIELDS[name].unit, FIELDS[name].definition) for name in METRICS
    }
    assert all(field.definition for field in FIELDS.values())
    assert len({field.title for field in MEASURES.values()}) == len(MEASURES)


@given(value=st.floats(allow_nan=False, allow_infinity=False), sign=st.sampled_from(["", "+"]))
def test_a_number_is_written_in_three_digits(value, sign):
    text = number_text(value, f"{sign}.3g")
    exact = Decimal(value)
    step = Decimal(10) ** (exact.adjusted() - (1 if "·10" in text else 2)) if exact else 0
    assert abs(read(text) - exact) <= Decimal("0.5000001") * step
    assert "-" not in text and "e" not in text
    assert text.startswith("+") == (sign == "+" and value > 0)
    assert len(text.strip("+−").partition("·")[0]) <= 6


@given(value=st.floats(-1e6, 1e6), digits=st.integers(0, 4))
def test_a_number_has_the_decimals_that_were_requested(value, digits):
    text = number_text(value, f".{digits}f")
    assert abs(read(text) - Decimal(value)) <= Decimal("0.5000001") * Decimal(10) ** -digits
    assert -read(text).as_tuple().exponent == digits


@pytest.mark.parametrize(
    ("value", "format", "text"),
    [
        (None, ".3g", "–"), (math.nan, "d", "–"), (math.inf, ".3g", "∞"), (-math.inf, ".1f", "−∞"),
        (-0.0, ".3g", "0"), (-0.001, ".1f", "0.0"), (-0.001, "+.1f", "0.0"), (1234567, "d", "1,234,567"),
        (29800.0, ".3g", "3.0·10⁴"), (-1.2e-7, ".3g", "−1.2·10⁻⁷"), (9999.0, ".3g", "1.0·10⁴"), (1230, ".3g", "1,230"),
        (0.000999999, ".3g", "0.001"), (0.5, "+.3g", "+0.5"), (1234.5, ".1f", "1,234.5"), (16.94, "+.1f", "+16.9"),
    ],
)  # fmt: skip
def test_numbers_that_are_easily_written_wrong(value, format, text):
    assert number_text(value, format) == text


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100%"), (0.99956, ">99.9%"), (0.9994, "99.9%"), (0.26461, "26.5%"), (0.0, "0%")]
)
def test_what_is_not_all_is_not_called_so(share: float, text: str):
    assert FIELDS["flush_to_zero"].quantity(share) == text


def test_values_are_listed_as_the_network_computes_them():
    assert FIELDS["operation"].ordered(["backward", "evaluation", "forward"]) == ["forward", "backward", "evaluation"]
    assert FIELDS["module"].ordered(["vision.qkv", "fc2", "core", "qkv"]) == ["qkv", "core", "fc2", "vision.qkv"]
    assert FIELDS["run_id"].ordered(["b", "a"]) == ["b", "a"]
