"""JSON files that are read into frozen dataclasses and checked there, once.

@dataclass(frozen=True, config=STRICT)  # of pydantic.dataclasses
class Queue: ...

read_json(Queue, path)
"""

from __future__ import annotations

import errno
import json
import zlib
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from binade.data.run.store import no_link, read_file, write_atomic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
_adapters: dict[type, TypeAdapter[Any]] = {}
STRICT = ConfigDict(strict=True, extra="forbid")
MOST_BYTES = 16 << 20  # of a JSON file
MARK = b', "crc32": "'  # before the last entry of an object with a checksum


def _is_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Pid = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # an argument of a process
Time = Annotated[str, AfterValidator(_is_time)]  # ISO 8601


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """The validator for values of this type; built once."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def parse_json(kind: type[T], content: bytes) -> T:
    """Raises ValueError, whose message is one line that names the field."""
    try:
        return adapter_of(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        excerpt = json.dumps(first["input"], default=str)[:40]
        raise ValueError(f"{where} is {excerpt}: {first['msg']}" if where else first["msg"]) from None


def sealed(record: bytes) -> bytes:
    """A nonempty JSON object with a last entry added: the CRC-32 of everything before it."""
    before = record.rstrip().removesuffix(b"}").rstrip()
    return before + MARK + b'%08x"}' % zlib.crc32(before)


def unsealed(record: bytes) -> bytes:
    """The object without the checksum that `sealed` added; one without a checksum is returned unchanged. Raises
    ValueError if the checksum is wrong."""
    before, mark, checksum = record.rstrip().rpartition(MARK)
    if not mark:
        return record
    expected, actual = checksum.removesuffix(b'"}'), b"%08x" % zlib.crc32(before)
    if expected != actual:
        raise ValueError(f"it has CRC-32 {actual.decode()}, expected {expected[:8].decode(errors='replace')}")
    return before + b"}"


def read_json(kind: type[T], path: Path, base: Path | None = None) -> T:
    """Read a file that may have a checksum. base: the directory below which no link is followed, by default the file's.
    Raises OSError, and ValueError if it is damaged."""
    content = read_file(path, MOST_BYTES, base or path.parent)
    try:
        content = unsealed(content)
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None
    return parse_json(kind, content)


def write_json(path: Path, record: DataclassInstance) -> None:
    """Replace the file. If a full disk has no room for a second file, the first one is overwritten in one write. Raises
    OSError."""
    content = json.dumps(asdict(record)).encode()
    try:
        write_atomic(path, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        with open(path, "r+b", buffering=0, opener=no_link) as file:
            file.write(content.ljust(path.stat().st_size))  # spaces after the end keep it valid without a second step
