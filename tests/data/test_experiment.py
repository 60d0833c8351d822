"""Results of experiments on disk: what is read is what was written, whenever the process ended."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from pathlib import Path

import duckdb
import numpy as np
import pytest

from binade.data.index.catalog import Catalog
from binade.data.run import experiment
from binade.data.run.directory import DONE, RunError
from binade.data.run.experiment import (
    EXPERIMENT,
    NONE,
    BatchResult,
    EffectGroup,
    ExperimentWriter,
    RouterChoices,
    TreatmentKey,
    check_experiment,
    experiment_files,
    read_logprobs,
    read_results,
    read_routes,
)
from binade.data.run.run_writer import RunWriter
from binade.data.run.verify import verify

KEY = TreatmentKey("mxfp4", "0" * 64, EffectGroup("linear", 3, "fc1"), "weight", False, base=NONE)
SEQUENCES = 3


def result(key: TreatmentKey, batch: int, routes: bool = False) -> BatchResult:
    """Random numbers, of which some have no short decimal form; one loss is infinite."""
    random = np.random.default_rng(batch)
    losses = (*random.normal(3, 1, SEQUENCES - 1).tolist(), math.inf)
    logprobs = tuple(-random.exponential(2, tokens) for tokens in (5, 0, 7))
    chosen = tuple(
        (RouterChoices(2, "router", 8, random.integers(0, 8, (len(x), 3)), random.random(len(x))),) for x in logprobs
    )
    values = tuple(random.random(SEQUENCES).tolist())
    return BatchResult(key, batch, losses, (5, 0, 7), values, values[::-1], 0.3, logprobs, chosen if routes else ())


def same(a: BatchResult, b: BatchResult) -> bool:
    """But for log-probabilities and routes; seconds are divided and added up again."""
    names = ("key", "batch", "losses", "tokens", "kl", "kl_reversed")
    return all(getattr(a, name) == getattr(b, name) for name in names) and a.seconds == pytest.approx(b.seconds)


@pytest.fixture
def run(tmp_path: Path) -> RunWriter:
    return RunWriter.create(tmp_path, "measure", {"model": "mine", "kind": EXPERIMENT})


def test_what_is_read_is_what_was_written(run: RunWriter):
    written = [result(key, batch, routes=key == NONE) for batch in range(3) for key in (NONE, KEY)]
    writer = ExperimentWriter(run.directory)
    for each in written:
        writer.add(each)
    found = read_results(run.directory)
    assert len(found) == 6 and all(map(same, found, written))
    assert len(experiment_files(run.directory)) == 3
    logprobs, routes = read_logprobs(run.directory), read_routes(run.directory)
    for each in written:
        assert all(map(np.array_equal, logprobs[each.place], each.logprobs))
        for found_routes, own in zip(routes.get(each.place, []), each.routes, strict=True):
            for router, expected in zip(found_routes, own, strict=True):
                assert (router.layer_index, router.module, router.experts) == (2, "router", 8)
                assert np.array_equal(router.choices, expected.choices)
                assert np.array_equal(router.margins, expected.margins)


def test_duckdb_reads_the_files(run: RunWriter):
    writer = ExperimentWriter(run.directory)
    for each in (result(NONE, 0), result(KEY, 0)):
        writer.add(each)
    table = f"read_parquet('{run.directory}/experiment/results-*.parquet')"
    rows = duckdb.sql(f"SELECT treatment, sequence, loss FROM {table} WHERE base IS NOT NULL ORDER BY 2").fetchall()
    assert rows == [(KEY.id, at, loss) for at, loss in enumerate(result(KEY, 0).losses)]


def test_a_large_table_has_several_files(run: RunWriter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiment, "PART", 3000)
    written = [result(key, batch) for batch in range(12) for key in (NONE, KEY)]
    for half in (written[:13], written[13:]):  # continued by another process
        writer = ExperimentWriter(run.directory)
        for each in half:
            writer.add(each)
    assert len(experiment_files(run.directory)) > 4
    assert all(map(same, read_results(run.directory), written))
    assert len(read_logprobs(run.directory)) == len(written)


def _write(directory: Path) -> None:
    writer = ExperimentWriter(directory)
    done = {each.place for each in read_results(directory)}
    for batch in range(40):
        for key in (NONE, KEY):
            if (key.id, batch) not in done:
                writer.add(result(key, batch, routes=True))


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.08])
def test_a_killed_writer_leaves_whole_results_and_is_continued(run: RunWriter, delay: float):
    for _ in range(6):
        process = multiprocessing.get_context("fork").Process(target=_write, args=(run.directory,))
        process.start()
        time.sleep(delay)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        check_experiment(run.directory)
        for found in read_results(run.directory):
            assert same(found, result(found.key, found.batch))
            assert all(
                map(np.array_equal, read_logprobs(run.directory)[found.place], result(found.key, found.batch).logprobs)
            )
    _write(run.directory)
    places = {each.place for each in read_results(run.directory)}
    assert places == {(key.id, batch) for batch in range(40) for key in (NONE, KEY)}
    assert places == set(read_routes(run.directory))


def test_of_two_versions_of_a_file_the_longer_is_read(run: RunWriter):
    """A process that is killed between the two steps of a replacement leaves both."""
    writer = ExperimentWriter(run.directory)
    writer.add(result(NONE, 0))
    before = {run.directory / name: (run.directory / name).read_bytes() for name in experiment_files(run.directory)}
    writer.add(result(KEY, 0))
    for path, content in before.items():
        path.write_bytes(content)
    assert [each.key for each in read_results(run.directory)] == [NONE, KEY]


@pytest.mark.parametrize("table", ["results", "tokens"])
def test_a_damaged_file_is_named(run: RunWriter, table: str):
    writer = ExperimentWriter(run.directory)
    for each in (result(NONE, 0), result(KEY, 0)):
        writer.add(each)
    run.finish(DONE)
    (path,) = (run.directory / EXPERIMENT).glob(f"{table}-*")
    whole = path.read_bytes()
    for at in range(0, len(whole), max(len(whole) // 40, 1)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RunError, match=rf"{table}-[0-9]{{5}}-[0-9a-f]+\.parquet is damaged: its CRC-32 is"):
            check_experiment(run.directory)
    assert any(path.name in line for line in verify(run.directory.parent).damaged)
    with Catalog.open(run.directory.parent) as catalog:
        assert any("some results" in line and path.name in line for line in catalog.refused)


def test_a_process_that_opens_the_index_reads_only_experiments_that_have_changed(run: RunWriter):
    """What is damaged behind the index's back, with the size and time that it had, is not noticed; a new result is."""
    writer = ExperimentWriter(run.directory)
    for each in (result(NONE, 0), result(KEY, 0)):
        writer.add(each)
    run.finish(DONE)

    def effects() -> tuple[list[str], list[int]]:
        """What is refused, and of how many sequences each effect is."""
        with Catalog.open(run.directory.parent) as catalog:
            return catalog.refused, catalog.ask("SELECT sequences FROM effect", [])["sequences"].tolist()

    before = effects()
    (path,) = (run.directory / EXPERIMENT).glob("results-*")
    whole, times = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert before == effects() == ([], [SEQUENCES])
    path.write_bytes(whole)
    ExperimentWriter(run.directory).add(result(KEY, 1))
    ExperimentWriter(run.directory).add(result(NONE, 1))
    assert effects() == ([], [2 * SEQUENCES])
    path.write_bytes(whole[:-1])
    for _ in range(2):
        (problem,), _ = effects()
        assert "some results" in problem and path.name in problem


@pytest.mark.parametrize("name", ["effects.jsonl", "parity.json", "twin.jsonl", "held_out.jsonl"])
def test_a_file_of_an_earlier_version_is_named(run: RunWriter, name: str):
    (run.directory / name).write_text("{}")
    run.finish(DONE)
    with pytest.raises(RunError, match=f"its {name} is of an earlier version"):
        check_experiment(run.directory)
    with Catalog.open(run.directory.parent) as catalog:
        assert any(f"its {name} is of an earlier version, and is not read" in line for line in catalog.refused)
