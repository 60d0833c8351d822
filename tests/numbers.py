"""Reads numbers as the app writes them."""

from __future__ import annotations

from decimal import Decimal

SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
NUMBER = r"(?<![\w])[−\d][\d.,]*(?:·10⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)?"  # a regular expression


def read(text: str) -> Decimal:
    """The value of "−3.0·10⁴" or "1,230"."""
    mantissa, _, exponent = text.replace("−", "-").replace(",", "").partition("·10")
    return Decimal(mantissa).scaleb(int(exponent.translate(SUPERSCRIPTS) or 0))
