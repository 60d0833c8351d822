"""The kinds of records. A new one is a type with its file, and one line here."""

from __future__ import annotations

from typing import Any

from binade.data.run.events import EVENT
from binade.data.run.losses import LOSS
from binade.data.run.records import RecordKind

RECORD_KINDS: tuple[RecordKind[Any], ...] = (LOSS, EVENT)
