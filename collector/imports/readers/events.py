"""Event files of TensorBoard."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.imports.readers.kind import Confidence, Kind, Start
from binade.collector.imports.readers.series import Columns, Notes, Rows, Series, Window
from binade.data.run.store import regular

NAME = "tfevents"  # in the name of each event file
VERSION = b"brain.Event:"  # in the first record
OF_TRAINER = "args/text_summary"  # a tag that the Trainer of Hugging Face writes
CUT = "it is longer than the file, so it may be cut"


@dataclass(frozen=True, kw_only=True)
class Events(Kind):
    """The scalars of event files. Those of a folder are one log: each start of a training adds a file, and their names
    sort by time."""

    def recognize(self, start: Start) -> Confidence:
        if VERSION in start.content[:64]:
            return Confidence.SIGNATURE
        damaged = NAME in start.path.name and bool(start.content)  # then it says which record
        return Confidence.COLUMNS if damaged else Confidence.NONE

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        return super().read(path, replace(columns, step=None))

    def rows(self, path: Path, notes: Notes) -> Rows:
        try:
            from google.protobuf.message import DecodeError
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.util.tensor_util import make_ndarray
        except ImportError:
            raise ConfigError(
                "reading event files needs the package tensorboard: pip install 'binade[tensorboard]'"
            ) from None
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file() and self.recognize(Start.of(file)))
        for file in files:
            step = None
            for place, record in _records(file):
                try:
                    if isinstance(record, str):
                        raise ValueError(record)
                    event = Event.FromString(record)
                except (DecodeError, ValueError) as error:
                    after = "" if step is None else f" after step {step}"
                    reason = "it is not an event" if isinstance(error, DecodeError) else str(error)
                    (notes.cut if reason == CUT else notes.damaged).append(f"{place}{after}: {reason}")
                    continue
                step = event.step
                for value in event.summary.value:
                    if value.tag == OF_TRAINER:
                        notes.window = Window.INTERVAL
                    number = value.simple_value if value.HasField("simple_value") else None
                    if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                        with suppress(TypeError, ValueError):  # it is a text
                            number = float(make_ndarray(value.tensor))
                    if number is not None:
                        yield place, {"step": event.step, value.tag: number}


def _records(path: Path) -> Iterator[tuple[str, bytes | str]]:
    """The place of each record of an event file, and its content, or why it cannot be read. A record is its length, 8
    bytes; a checksum of the length, 4; the content; a checksum of the content, 4. (TensorBoard's own reader ends at
    the first damaged record without a word.)"""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open(path, "rb", opener=regular) as file:
        left, number = os.fstat(file.fileno()).st_size, 0
        while left:
            number += 1
            place, header = f"{path}, record {number}", file.read(12)
            if len(header) < 12:
                yield place, CUT
                return
            length, checksum = struct.unpack("<QI", header)
            if checksum != masked_crc32c(header[:8]):
                yield place, f"the checksum of its length is wrong, so it and the {left - 12:,} bytes after it are lost"
                return
            left -= 16 + length
            if left < 0:
                yield place, CUT
                return
            content, (checksum,) = file.read(length), struct.unpack("<I", file.read(4))
            yield place, content if checksum == masked_crc32c(content) else "its checksum is wrong"
