"""A Filter selects tensors. It can be converted to SQL with parameters, an English sentence, a dict and a URL query.

An empty field does not restrict. Values of one field are alternatives; all fields must match.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from binade.data.words.fields import IDENTITIES


class FilterError(ValueError):
    """A filter was given a field that does not exist or a value of the wrong kind."""

    exit_status = 2


@dataclass(frozen=True)
class Filter:
    """Selects tensors by the allowed values of each field. An empty field does not restrict; all fields must match.

    Lists are converted to tuples. Raises FilterError for a value of the wrong type.
    """

    run_id: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    size: tuple[str, ...] = ()
    dataset: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    quant_type: tuple[str, ...] = ()
    layer_type: tuple[str, ...] = ()
    layer_index: tuple[int, ...] = ()
    module: tuple[str, ...] = ()
    component: tuple[str, ...] = ()
    operation: tuple[str, ...] = ()
    phase: tuple[str, ...] = ()
    tensor_name: tuple[str, ...] = ()
    iteration: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    rank: tuple[int, ...] = ()
    expert: tuple[int, ...] = ()
    stage: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in FIELDS:
            values = getattr(self, name)
            if isinstance(values, (str, int)) or not isinstance(values, Iterable):
                raise FilterError(f"filter {name}: a list of values is expected, not {values!r}")
            object.__setattr__(self, name, tuple(dict.fromkeys(_checked(name, value) for value in values)))

    def sql(self) -> tuple[str, list[Any]]:
        """A condition on the table `tensor` and its parameters; "true" if nothing is restricted."""
        parts: list[str] = []
        parameters: list[str | int] = []
        for name, values in self.items():
            parts.append(f"tensor.{name} IN ({', '.join('?' * len(values))})")
            parameters += values
        return " AND ".join(parts) or "true", parameters

    def sentence(self) -> str:
        """The selection in English: "layer 1 or 2, operation forward"."""
        parts = []
        for name, values in self.items():
            shown = [str(value) for value in values]
            if len(shown) > 4:
                shown = [*shown[:3], f"{len(shown) - 3} more"]
            listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
            parts.append(f"{IDENTITIES[name].inline} {listed}")
        return ", ".join(parts) or "all tensors"

    def items(self) -> list[tuple[str, tuple[str | int, ...]]]:
        """The fields that restrict, with their values."""
        return [(name, getattr(self, name)) for name in FIELDS if getattr(self, name)]

    def to_dict(self) -> dict[str, list[str | int]]:
        return {name: list(values) for name, values in self.items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Filter:
        """The inverse of to_dict. Raises FilterError for an unknown field or a wrong value."""
        if not isinstance(given, Mapping):
            raise FilterError(f"a filter is made from a dict, not from {type(given).__name__}")
        unknown = sorted(str(name) for name in given if name not in FIELDS)
        if unknown:
            raise FilterError(f"unknown filter {unknown[0]!r}: expected one of {', '.join(FIELDS)}")
        return cls(**given)

    def to_query(self) -> dict[str, list[str]]:
        """URL parameters: a list of texts for each field."""
        return {name: [str(value) for value in values] for name, values in self.items()}

    @classmethod
    def from_query(cls, query: Mapping[str, list[str]]) -> tuple[Filter, list[str]]:
        """A filter from URL parameters, and a sentence for each value that makes no sense and was left out. Parameters
        that are not filter fields are ignored."""
        kept: dict[str, Any] = {}
        problems = []
        for name in FIELDS:
            field = IDENTITIES[name]
            wanted = "number" if field.is_integer else "string"
            for text in query.get(name, []):
                try:
                    kept.setdefault(name, []).append(_checked(name, int(text) if field.is_integer else text))
                except ValueError:
                    problems.append(f"The URL asks for {field.inline} {text[:40]!r}, which is not a {wanted}.")
        return cls(**kept), problems

    def without(self, *names: str) -> Filter:
        """The same filter without some fields."""
        kept: dict[str, Any] = {key: values for key, values in self.items() if key not in names}
        return Filter(**kept)


FIELDS = tuple(f.name for f in fields(Filter))
INTEGER_FIELDS = tuple(name for name in FIELDS if IDENTITIES[name].is_integer)


def _checked(name: str, value: Any) -> str | int:
    if name not in INTEGER_FIELDS:
        if not isinstance(value, str):
            raise FilterError(f"filter {name}: {value!r} is not a string")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise FilterError(f"filter {name}: {value!r} is not valid Unicode")
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # also accepts integers of NumPy and pandas
    except TypeError:
        raise FilterError(f"filter {name}: {value!r} is not an integer") from None
    bits = 64 if name == "iteration" else 32
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise FilterError(f"filter {name}: an integer does not fit in {bits} bits")
    return number
