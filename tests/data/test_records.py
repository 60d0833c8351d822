"""Records of a run: what is written is read, whatever a kill or a disk does to the last line, and the index has it."""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from binade.collector.training.resume import _cut
from binade.data.index import intake
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import events_of, losses_of
from binade.data.index.sandbox import Sandbox
from binade.data.run.directory import DONE
from binade.data.run.events import EVENT, Event, EventKind, append_event, read_events
from binade.data.run.losses import LOSS, read_losses
from binade.data.run.records import RecordKind, append_record, read_lines
from binade.data.run.run_writer import RunWriter
from binade.data.run.verify import verify
from tests.data.builder import assorted, make_run

STEPS = [{"iteration": i, "loss": 5.0 - i / 8, "lr": 0.1 * i, "recorded": i == 0} for i in range(-2, 4)]
EVENTS = [Event(EventKind.WARNING, i, f"the {i}th \u2260 \N{SNOWMAN}", "2026-01-02", place="fc1") for i in range(3)]
WRITTEN: dict[RecordKind[Any], list[dict[str, Any]]] = {LOSS: STEPS, EVENT: [asdict(event) for event in EVENTS]}


def write(directory: Path, kind: RecordKind[Any]) -> bytes:
    for record in WRITTEN[kind]:
        append_record(directory, kind, record)
    return (directory / kind.file).read_bytes()


def plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value if isinstance(value, dict) else asdict(value)))


def read(directory: Path, kind: RecordKind[Any]) -> list[Any]:
    return [plain(value) for value in read_lines(kind, directory, kind.file).values]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "root", assorted(1)).directory
    for kind in WRITTEN:
        write(run, kind)
    return run


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_each_line_is_json_with_the_crc_of_what_is_before_it(kind: RecordKind[Any], tmp_path: Path):
    for line, record in zip(write(tmp_path, kind).splitlines(), WRITTEN[kind], strict=True):
        found = json.loads(line)
        before = line[: line.rindex(b', "crc32"')]
        assert int(found.pop("crc32"), 16) == zlib.crc32(before) and found == plain(record)


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_a_last_line_that_is_cut_at_any_byte_is_left_out_and_counted(kind: RecordKind[Any], tmp_path: Path):
    content, expected = write(tmp_path, kind), plain_all(kind)
    last = content.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(content) - 1):
        (tmp_path / kind.file).write_bytes(content[:size])
        lines = read_lines(kind, tmp_path, kind.file)
        assert [plain(value) for value in lines.values] == expected[:-1]
        assert lines.problem is None and lines.torn == (size > last) and lines.stop == last


@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_what_is_written_after_a_cut_line_is_read(kind: RecordKind[Any], tmp_path: Path):
    content, expected = write(tmp_path, kind), plain_all(kind)
    (tmp_path / kind.file).write_bytes(content[:-9])  # as a full disk leaves it
    append_record(tmp_path, kind, WRITTEN[kind][0])
    assert read(tmp_path, kind) == [*expected[:-1], expected[0]]


@pytest.mark.parametrize("byte", [b"x", b"\r"])
@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.name)
def test_a_damaged_line_costs_itself_only(kind: RecordKind[Any], byte: bytes, tmp_path: Path):
    content, expected = write(tmp_path, kind), plain_all(kind)
    lines = content.splitlines(keepends=True)
    at = lines[1].index(b"iteration") + 12
    damaged = lines[1][:at] + byte + lines[1][at + 1 :]
    (tmp_path / kind.file).write_bytes(b"".join([lines[0], damaged, *lines[2:]]))
    found = read_lines(kind, tmp_path, kind.file)
    assert [plain(value) for value in found.values] == [expected[0], *expected[2:]]
    assert (
        found.torn == 0
        and found.problem is not None
        and f"line 2 of its {kind.file} is damaged: it has CRC-32" in found.problem
    )


def plain_all(kind: RecordKind[Any]) -> list[Any]:
    return [plain(record) for record in WRITTEN[kind]]


def test_lines_of_earlier_versions_have_no_checksum(tmp_path: Path):
    lines = "".join(json.dumps(record) + "\n" for record in WRITTEN[EVENT])
    (tmp_path / EVENT.file).write_text(lines)
    assert read_events(tmp_path) == EVENTS


def test_a_loss_curve_is_a_query(run: Path):
    """The table has what json finds in the files, and nothing else."""
    with Catalog.open(run.parent) as catalog, closing(Sandbox(catalog)) as sandbox:
        answer = sandbox.select(
            "SELECT iteration, (record->>'loss')::DOUBLE AS loss, (record->>'lr')::DOUBLE AS lr FROM record"
            " WHERE kind = 'loss' ORDER BY line"
        )
        rows = answer.rows.to_dict("records")
        assert rows == [{name: step[name] for name in ("iteration", "loss", "lr")} for step in STEPS]
        assert losses_of(catalog, [run.name]) == {run.name: STEPS}
        assert events_of(catalog, [run.name, "another"]) == {run.name: EVENTS, "another": []}


def in_index(catalog: Catalog, run: Path) -> list[Any]:
    catalog.sync()
    assert catalog.refused == []
    return catalog.records(LOSS, [run.name])[run.name]


def test_the_index_follows_files_that_grow_are_cut_replaced_and_deleted(run: Path):
    more = {"iteration": 4, "loss": 1.5}
    file = run / LOSS.file
    with Catalog.open(run.parent) as catalog:
        assert in_index(catalog, run) == STEPS
        with open(file, "ab") as torn:
            torn.write(b'{"iteration": 4, "lo')
        assert in_index(catalog, run) == STEPS
        with open(file, "ab") as rest:  # the rest of the line, as a slow disk shows it
            rest.write(b'ss": 1.5}\n')
        append_record(run, LOSS, {"iteration": 5, "loss": 1.25})
        before, version = in_index(catalog, run), catalog.progress
        assert before == [*STEPS, more, {"iteration": 5, "loss": 1.25}]
        _cut(file, len(b"".join(file.read_bytes().splitlines(keepends=True)[:3])))
        for iteration in range(9):  # longer than before, unseen until now
            append_record(run, LOSS, {"iteration": iteration + 1, "loss": 9.0})
        found = in_index(catalog, run)
        assert found == read_losses(run) == [*STEPS[:3], *({"iteration": i + 1, "loss": 9.0} for i in range(9))]
        assert catalog.progress != version
        other = run / "other"
        other.write_text("".join(json.dumps({"iteration": i, "loss": 1.0}) + "\n" for i in range(3)))
        os.replace(other, file)
        assert [step["loss"] for step in in_index(catalog, run)] == [1.0] * 3
        file.unlink()
        assert in_index(catalog, run) == []
    append_record(run, LOSS, more)
    with Catalog.open(run.parent) as again:
        assert in_index(again, run) == [more]


def test_many_files_are_written_in_one_transaction(run: Path, monkeypatch: pytest.MonkeyPatch):
    """One for each file took a root of 600 runs from one second to twelve."""
    for number in range(20):
        shutil.copytree(run, run.with_name(f"{run.name}_{number}"))
    writes = []
    monkeypatch.setattr(intake, "put_records", lambda *given, put=intake.put_records: writes.append(put(*given)))
    with Catalog.open(run.parent) as catalog:
        assert writes == [None]
        found = catalog.records(LOSS, [path.name for path in run.parent.iterdir() if path.is_dir()])
        assert len(found) == 21 and all(steps == STEPS for steps in found.values())


def test_damage_is_reported_each_time_and_the_other_lines_are_shown(run: Path):
    file = run / LOSS.file
    file.write_bytes(file.read_bytes().replace(b'"loss": 5.0,', b'"loss": 6.0,'))
    for _ in range(2):
        with Catalog.open(run.parent) as catalog:
            (line,) = catalog.refused
            assert f"some losses of {run.name} are not shown: line 3 of its loss.jsonl is damaged" in line
            assert losses_of(catalog, [run.name])[run.name] == STEPS[:2] + STEPS[3:]
    (damaged,) = verify(run.parent).damaged
    assert "line 3 of its loss.jsonl" in damaged


def test_a_damaged_file_is_read_once_until_it_changes(run: Path):
    """Repaired behind the index's back, with the size and time that it had, it is still said to be damaged."""
    file = run / LOSS.file
    sound = file.read_bytes()
    file.write_bytes(sound.replace(b'"loss": 5.0,', b'"loss": 6.0,'))
    long_ago = time.time_ns() - 60_000_000_000
    for path in (file, *run.rglob("*"), run):
        os.utime(path, ns=(long_ago, long_ago))
    with Catalog.open(run.parent) as catalog:
        (line,) = catalog.refused
        file.write_bytes(sound)
        os.utime(file, ns=(long_ago, long_ago))
        catalog.sync()
        assert catalog.refused == [line]
    with Catalog.open(run.parent) as catalog:
        assert catalog.refused == [line]
        append_record(run, LOSS, more := {"iteration": 4, "loss": 1.5})
        catalog.sync()
        assert catalog.refused == [line]
        assert catalog.records(LOSS, [run.name])[run.name] == [*STEPS[:2], *STEPS[3:], more]
        shutil.copyfile(file, run / "copy")
        os.replace(run / "copy", file)
        assert in_index(catalog, run) == [*STEPS, more]


def test_events_of_all_ranks_are_in_the_table(tmp_path: Path):
    writer = RunWriter.create(tmp_path, "x", {"recipe": "bf16"}, ranks=2)
    events = [Event(EventKind.NON_FINITE, 3, "seen", "2026", rank=rank, order=5 - rank) for rank in (0, 1)]
    for event in events:
        append_event(writer.directory, event)
    writer.finish(DONE)
    with Catalog.open(tmp_path) as catalog:
        assert events_of(catalog, [writer.run_id])[writer.run_id] == events[::-1] == read_events(writer.directory)


def test_verify_counts_what_is_torn(run: Path, command: Any, capsys: pytest.CaptureFixture[str]):
    with open(run / LOSS.file, "ab") as file:
        file.write(b'{"iteration": 9')
    assert verify(run.parent).torn == 1 and command("verify", str(run.parent)) == 0
    assert "1 record cut short when a process was killed: left out" in capsys.readouterr().out
