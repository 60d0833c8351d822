"""What a comparison of two runs says: how many tensors differ, and the first one that does. `binade diff` and the page
*Difference* say the same."""

from __future__ import annotations

from binade.data.compare.difference import Difference, TensorDifference, Tolerance
from binade.data.compare.evidence import Measure, Sentence, exact, say

RELATIVE = Measure("relative", "Relative difference")
ABSOLUTE = Measure("largest", "Largest difference")


def conclusion(difference: Difference, tolerance: Tolerance) -> Sentence:
    """difference: with at least one row."""
    rows, first = difference.rows, difference.first(tolerance)
    if first is None:
        limit = _beyond(tolerance).replace("at least one", "any")
        largest = max(rows, key=lambda row: row.difference)
        if not largest.difference:
            return say("No tensor differs {limit}.", limit=limit)
        most = _described(largest)
        return _with(say("No tensor differs {limit}; largest difference: {most}.", limit=limit, most=most), most)
    count = sum(row.differs(tolerance) for row in rows)
    place = _described(rows[first])
    sentence = say(
        "{count} {tensors} {limit}; first difference{order}, after {before} {others} not: {place}.",
        count=count,
        tensors="tensors differ" if count != 1 else "tensor differs",
        limit=_beyond(tolerance),
        order=" in the order of names" * difference.in_order_of_names,
        before=first,
        others="tensors that do" if first != 1 else "tensor that does",
        place=place,
    )
    return _with(sentence, place)


def _beyond(tolerance: Tolerance) -> str:
    if isinstance(tolerance, str):
        return "by more than their dtypes explain"
    return "in at least one bit" if tolerance is None else f"by more than {tolerance:.4g}"


def _described(row: TensorDifference) -> Sentence:
    if row.by == "shape":
        return say("{place}, of shape {a} and {b}", place=row.place, a=str(row.shape), b=str(row.shape_b))
    size = exact(RELATIVE, row.difference)
    if row.by == "statistics":
        return say("{place}, relative difference {size.text} of statistics", place=row.place, size=size)
    if row.at is None or row.largest is None:
        return say("{place}, relative difference {size.text}", place=row.place, size=size)
    largest = exact(ABSOLUTE, row.largest)
    return say(
        "{place}, relative difference {size.text}, largest difference {largest.text} at {at}",
        place=row.place, size=size, largest=largest, at=str(list(row.at)),
    )  # fmt: skip


def _with(sentence: Sentence, part: Sentence) -> Sentence:
    """The sentence with the evidence of a part of it."""
    return Sentence(sentence, (*sentence.evidence, *part.evidence))
