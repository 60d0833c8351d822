"""Numbers as logs print them. A text is read whole or not at all: ValueError says why, and a part is never returned."""

from __future__ import annotations

import math
import re
from typing import Any

SIGN, POWER = r"([-+]?)", r"((?:[eE][-+]?[0-9]+)?)"
# Of re, with possessive quantifiers: on texts of at most LONGEST characters it is faster than RE2, and cannot go back.
PLAIN = re.compile(rf"{SIGN}([0-9]++\.?[0-9]*+|\.[0-9]++){POWER}")
NOT_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
# Between groups of three digits: comma, underscore, apostrophe, no-break space, narrow no-break space.
GROUPED = re.compile(rf"{SIGN}([1-9][0-9]{{0,2}}(?:[,_'’\xa0\u202f][0-9]{{3}})++(?:\.[0-9]*+)?){POWER}")
DECIMAL_COMMA = re.compile(rf"{SIGN}([0-9]++),([0-9]++){POWER}")
GROUPED_BY_POINTS = re.compile(rf"{SIGN}([1-9][0-9]{{0,2}}(?:\.[0-9]{{3}})++)(?:,([0-9]++))?{POWER}")
WRAPPED = re.compile(
    r"(?:(?:np|numpy|torch|jnp|jax|mx)\.)?(?:float[0-9]*+|bfloat16|int[0-9]*+|tensor|array|Array|DeviceArray)"
    r"\(\[*+([^\s,()\[\]]++)\]*+(?:,[^()]*+)?\)"
)
OF = re.compile(r"([^/]*+)/\s*+[0-9][0-9,_]*+")  # a step "3/20"
LONGEST = 400  # characters of a number


def number_of(value: Any, decimal_comma: bool = False) -> float:
    """decimal_comma: commas are decimal points, as in files with semicolons. Otherwise `2,5` is 2.5 and `1,234,567` is
    1234567, but `2,345` may be either and raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a number")
    try:
        return float(value) if not isinstance(value, str) else _of_text(value.strip(), decimal_comma, whole=False)
    except OverflowError:
        raise ValueError("expected a number") from None


def whole_of(value: Any, decimal_comma: bool = False) -> float:
    """The number of a step, in which commas separate groups of digits; also of one that is written "3/20"."""
    if not isinstance(value, str):
        return number_of(value)
    text = value.strip()
    of = OF.fullmatch(text) if "/" in text and len(text) <= LONGEST else None
    return _of_text(of[1].strip() if of else text, decimal_comma, whole=True)


def _of_text(text: str, decimal_comma: bool, whole: bool) -> float:
    if len(text) > LONGEST:
        raise ValueError("expected a number")
    if not decimal_comma and PLAIN.fullmatch(text) and not math.isinf(number := float(text)):
        return number
    if wrapped := WRAPPED.fullmatch(text):
        text = wrapped[1]
    if NOT_FINITE.fullmatch(text):
        return float(text)
    if not (plain := _plain(text, decimal_comma, whole)):
        raise ValueError("expected a number")
    if math.isinf(number := float(plain)):
        raise ValueError("expected a number of float64")
    return number


def _plain(text: str, decimal_comma: bool, whole: bool) -> str:
    """The number with a decimal point and without groups; "" if the text is not a number."""
    comma, points = DECIMAL_COMMA.fullmatch(text), GROUPED_BY_POINTS.fullmatch(text)
    grouped = GROUPED.fullmatch(text)
    if points and (decimal_comma or (points[3] and not whole)):
        return f"{points[1]}{points[2].replace('.', '')}.{points[3] or 0}{points[4]}"
    if comma and grouped and not decimal_comma and not whole:
        grouping, decimal = text.replace(",", ""), text.replace(",", ".")
        raise ValueError(f"it may be {grouping} or {decimal}: expected a decimal point")
    if comma and (decimal_comma or not whole):
        return f"{comma[1]}{comma[2]}.{comma[3]}{comma[4]}"
    if grouped and not decimal_comma:
        return grouped[1] + "".join(c for c in grouped[2] if c.isdigit() or c == ".") + grouped[3]
    return text if PLAIN.fullmatch(text) else ""
