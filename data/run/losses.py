"""The losses of a run: loss.jsonl, one record per iteration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from binade.data.run.json_files import Finite, Whole, parse_json, unsealed
from binade.data.run.records import RecordKind, read_records
from binade.data.run.store import inside


class First(TypedDict):
    """The first iteration that a training has read, with its hashes as in `Step`."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    iteration: Whole
    data_sha256: str
    weights_sha256: str | None


class Step(TypedDict):
    """A record of loss.jsonl. It may have other fields: what the training loop has logged."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    iteration: Whole  # from 0 under the recipe, below 0 in warm-up
    loss: Finite | None  # in nats per token; None if it is unknown or not finite
    not_finite: NotRequired[bool]  # of a loss of None: whether it is NaN or infinite; see `is_lost`
    window: NotRequired[Whole | None]  # of how many iterations the loss is the mean: 1 if absent, None if unknown
    seconds: NotRequired[Finite | None]  # that the iteration took
    time: NotRequired[Finite | None]  # since 1970, in seconds
    data_sha256: NotRequired[str | None]  # of all data that the run has read so far
    weights_sha256: NotRequired[str | None]  # of a sample of the weights at the start, of an instrumented run
    first: NotRequired[First]  # in the first record, if the training began at an earlier iteration
    settings: NotRequired[dict[str, Any]]  # in the first record of an import: what run.json says of these losses


LOSS: RecordKind[Any] = RecordKind("loss", "loss.jsonl", Step, "losses")


def read_losses(directory: Path) -> list[dict[str, Any]]:
    """The records of loss.jsonl. Lines that are damaged or cut short are left out. Raises OSError."""
    return read_records(LOSS, directory)


def is_lost(step: Mapping[str, Any]) -> bool:
    """Whether the loss of a record is NaN or infinite, rather than unknown. A record that does not say so comes from a
    log of losses, where nothing else is None, unless it says whether tensors were recorded."""
    return step["loss"] is None and bool(step.get("not_finite", "recorded" not in step))


def first_record(directory: Path) -> dict[str, Any] | None:
    """The first record of loss.jsonl, without reading the others. None if there is no valid one."""
    try:
        with open(directory / LOSS.file, "rb", opener=inside(directory)) as file:
            record: dict[str, Any] = parse_json(LOSS.type, unsealed(file.readline()))
            return record
    except (OSError, ValueError):
        return None


def first_step(directory: Path) -> str | None:
    """The first iteration that a run's training has read, as JSON, and the hashes of its data and of the weights before
    it: as its first record says, or that record's. None if there is no valid one."""
    if (record := first_record(directory)) is None:
        return None
    first = record.get("first", record)
    return json.dumps({name: first.get(name) for name in ("iteration", "data_sha256", "weights_sha256")})
