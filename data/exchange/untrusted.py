"""Reads untrusted JSON files strictly, checks them against dataclasses, and refuses them with one short sentence."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from binade.data.run.json_files import adapter_of

T = TypeVar("T")
REASONS = {
    "string_type": "is not a string",
    "int_type": "is not a whole number",
    "list_type": "is not a list",
    "tuple_type": "is not a list",
    "dict_type": "is not an object",
    "dataclass_type": "is not an object",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is empty",
    "unexpected_keyword_argument": "has an unknown name",
    "string_unicode": "contains an unpaired surrogate",
    "value_error": "{error}",
}


class RefusedError(ValueError):
    """The reason why a file is refused: a sentence without the file's name and the full stop."""


class Record:
    """Base of dataclasses that are read from a file: the file must have every field, even those with a default, and no
    others. Constructing one in Python checks nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        names = [field.name for field in fields(source)]

        def complete(given: Any) -> Any:
            if isinstance(given, dict) and (missing := [name for name in names if name not in given]):
                raise ValueError(f"lacks {', '.join(missing)}")
            return given

        return core_schema.no_info_before_validator_function(complete, handler(source))


def _free_of(characters: str) -> AfterValidator:
    search = re.compile(f"[{characters}]").search

    def check(text: str) -> str:
        if search(text):
            raise ValueError("contains a control character")
        return text

    return AfterValidator(check)


def at_most(entries: int) -> BeforeValidator:
    """For Annotated lists and objects: the maximum number of entries, checked before any entry is parsed."""

    def check(given: Any) -> Any:
        if isinstance(given, dict | list) and len(given) > entries:
            raise ValueError(f"has more than {entries} entries")
        return given

    return BeforeValidator(check)


LINE = _free_of(r"\x00-\x1f\x7f")  # for Annotated[str, ...]: a text on one line
LINES = _free_of(r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f")  # one with line breaks and tabs


def parse(kind: type[T], content: bytes, marker: str, version: int, most_values: int) -> T:
    """The record of a file that is marked as {marker: version, ...}. For any content, it raises only RefusedError."""
    given = _read_json(content)
    if not isinstance(given, dict) or marker not in given:
        raise RefusedError(f'it has no "{marker}": it is another kind of file')
    number = given.pop(marker)
    if type(number) is not int:
        raise RefusedError("its version is not a whole number")
    if number != version:
        raise RefusedError(
            f"its version is {str(number)[:20]}, and this Binade reads version {version}: use the version that wrote it"
        )
    if _count(given, most_values) > most_values:
        raise RefusedError(f"it contains more than {most_values:,} values")
    try:
        return adapter_of(kind).validate_python(given)
    except ValidationError as error:
        raise RefusedError(_reason(error)) from None


def _read_json(content: bytes) -> Any:
    try:
        return json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError:
        raise RefusedError("it is not UTF-8 text") from None
    except RecursionError:
        raise RefusedError("it is nested too deeply") from None
    except RefusedError:
        raise
    except ValueError:  # not JSON, or an integer with thousands of digits
        raise RefusedError("it is not JSON") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise RefusedError("an object has a duplicate key")
    return entries


def _constant(name: str) -> None:
    raise RefusedError(f"it contains {name}, which is not valid JSON")


def _count(given: Any, most: int) -> int:
    """The number of values in a document; counting stops soon after the maximum."""
    count, left = 0, [given]
    while left and count <= most:
        count += 1
        inner = left.pop()
        if isinstance(inner, dict | list):
            left += inner.values() if isinstance(inner, dict) else inner
    return count


def _reason(error: ValidationError) -> str:
    """What is wrong and where, without the value, which may be enormous."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = list(first["loc"])
    if "[key]" in place:  # the name of an entry
        del place[-2:]
    elif first["type"] == "unexpected_keyword_argument":
        del place[-1:]
    where = ascii(".".join(str(part)[:40] for part in place))[1:-1] or "it"
    reason = REASONS.get(first["type"], "does not have the expected form")
    return f"{where} {reason.format(**first.get('ctx', {}))}"
