"""What is left when a run is refused a write, finds the disk full, is killed or cancelled, or is read meanwhile."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunInfo, list_runs
from tests.collector.forked import run_forked
from tests.conftest import ended, start_binade, start_python, until

pytestmark = pytest.mark.slow

# One layer and 64 tokens, without end: 35 tensors an iteration.
ENDLESS = (
    "run", "--layers", "1", "--micro-batch-size", "1", "--sequence-length", "64", "--backend", "torch", "--scores", "",
    "--quantization", "mxfp8", "--control-iter", "1000000",
)  # fmt: skip
LONG = (*ENDLESS, "--control-iter", "100")  # in this process or a fork of it, where nothing would end it
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _end_what_was_started() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().kill()


def start(root: Path, *arguments: str, **options) -> subprocess.Popen[str]:
    process = start_binade(*ENDLESS, "--tensor-save-dir", root, *arguments, **options)
    STARTED.append(process)
    return process


def after_iteration(process: subprocess.Popen[str], number: int) -> None:
    """Read the collector's output until it says that an iteration is done."""
    for line in process.stdout:
        if line.startswith(f"iteration {number} "):
            return
    raise AssertionError(process.stderr.read())


def only_run(root: Path) -> RunInfo:
    (run,), refused = list_runs(root)
    assert refused == []
    return run


def check_rows(root: Path, *, files_too: bool = True) -> int:
    """Every row's file loads; no part is left; and (files_too) no file is there that no row names. Returns the rows."""
    with Catalog.open(root) as catalog:
        assert catalog.refused == []
        rows = catalog.tensors()
        for row in rows.itertuples():
            assert tuple(catalog.load(row.tensor_id).shape) == tuple(row.shape)
        assert catalog.distribution()["count"].sum() == rows["numel"].sum()
        if files_too:
            named = sorted(catalog.path(tensor_id) for tensor_id in rows["tensor_id"])
            assert named == sorted(path for path in root.glob("*/tensors/**/*") if path.is_file())
            assert [path for path in root.rglob("*") if path.name.endswith(".part")] == []
        return len(rows)


def check_failed(root: Path, status: int, error: str, expected: str) -> None:
    assert status == 1 and error.count("\n") == 1 and error.startswith("binade: ")
    assert expected.lower() in error.lower()
    run = only_run(root)
    assert run.status.state == "failed" and expected.lower() in run.status.reason.lower()
    assert run.status.finished and check_rows(root) == run.status.tensors
    assert "ended early: OSError" in (run.directory / "log.txt").read_text() or expected.startswith("No space")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limit", [40_000, 300_000], ids=["the first tensors", "the largest tensors"])
def test_a_refused_write_fails_cleanly(capfd, tmp_path, limit):
    """The kernel refuses to let any file grow beyond the limit: a real error in the middle of a write."""
    root = tmp_path / "runs"
    status = run_forked(root, *LONG[1:], before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    check_failed(root, status, capfd.readouterr().err, "File too large")
    assert check_rows(root) > 0


@pytest.mark.thorough
def test_a_refused_first_write_leaves_no_run(tmp_path):
    """In a process of its own, whose output goes to no file."""
    root = tmp_path / "runs"
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))}
    process = start(root, env={"PYTHONDONTWRITEBYTECODE": "1"}, **limit)  # it would cut off what others import
    error = ended(process).stderr
    assert process.returncode == 1 and error.startswith("binade: cannot write to ") and error.count("\n") == 1
    assert not root.exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("small_disk", ["1m", "9m"], indirect=True)
def test_a_full_disk_fails_cleanly(command, capsys, small_disk):
    status = command(*LONG, "--tensor-save-dir", str(small_disk))
    check_failed(small_disk, status, capsys.readouterr().err, "No space left on device")


@pytest.mark.parametrize("small_disk", ["5m"], indirect=True)
def test_a_disk_that_a_checkpoint_fills_is_reported_as_full(command, capsys, small_disk):
    """The model and its optimizer take 12 MB."""
    status = command(*LONG, "--checkpoint-every", "1", "--tensor-save-dir", str(small_disk))
    check_failed(small_disk, status, capsys.readouterr().err, "No space left on device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("small_disk", ["8k", "12k", "16k"], indirect=True)
def test_a_disk_full_from_the_start_leaves_no_half_run(command, capsys, small_disk):
    status, error = command(*LONG, "--tensor-save-dir", str(small_disk)), capsys.readouterr().err
    assert status == 1 and error.startswith("binade: ") and error.count("\n") == 1
    runs, refused = list_runs(small_disk)
    assert refused == [] and [run.status.state for run in runs] in ([], ["failed"])
    assert [path for path in small_disk.rglob("*") if path.name.endswith(".part")] == []


def test_a_killed_run_has_crashed_and_keeps_its_rows(tmp_path):
    """All that its status had counted is there; what was on its way is not, nor half of it."""
    process = start(tmp_path)
    after_iteration(process, 2)
    until(lambda: only_run(tmp_path).status.tensors >= 3 * 35, "three iterations to be counted")
    counted = only_run(tmp_path).status.tensors
    process.kill()
    process.communicate()
    run = only_run(tmp_path)
    assert run.status.state == "crashed" and run.status.iteration >= 1 and "killed" in run.status.reason
    assert check_rows(tmp_path, files_too=False) >= max(counted, run.status.tensors)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("signum", "times"),
    [pytest.param(signal.SIGTERM, 1, marks=pytest.mark.thorough), (signal.SIGINT, 3)],
    ids=["SIGTERM", "3 SIGINT"],
)
def test_a_cancelled_run_keeps_what_was_published(tmp_path, signum, times):
    process = start(tmp_path)
    after_iteration(process, 1)
    for _ in range(times):
        process.send_signal(signum)
    error = ended(process).stderr
    assert process.returncode == 130
    assert error == "binade: cancelled; what was recorded is kept\n"
    run = only_run(tmp_path)
    assert run.status.state == "cancelled" and run.status.finished and run.status.reason is None
    rows = check_rows(tmp_path)
    assert rows == run.status.tensors >= 2 * 35
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.pt")) == run.status.bytes


WATCHER = """
import json, sys, time
from binade.data.index.catalog import Catalog
seen, states = [], []
with Catalog.open(sys.argv[1]) as catalog:
    print("ready", flush=True)
    while not states or states[-1] not in (["done"], ["failed"], ["crashed"]):
        catalog.sync()
        assert catalog.refused == [], catalog.refused
        rows = catalog.tensors()
        states.append(catalog.runs()["state"].tolist())
        assert len(rows) % 35 == 0 and (not seen or len(rows) >= seen[-1])
        if len(rows) != (seen[-1] if seen else 0):
            for tensor_id in rows["tensor_id"][-35:]:
                catalog.load(tensor_id).double().sum()
        assert catalog.distribution()["count"].sum() == rows["numel"].sum()
        seen.append(len(rows))
        time.sleep(0.1)  # the collector needs the processor too
print(json.dumps({"seen": seen, "last": states[-1], "running": ["running"] in states}))
"""


@pytest.mark.thorough
def test_a_collector_writes_while_a_catalog_reads(tmp_path):
    watcher = start_python("-c", WATCHER, tmp_path)
    assert watcher.stdout.readline() == "ready\n"
    assert run_forked(tmp_path, *ENDLESS[1:], "--control-iter", "8") == 0
    done = ended(watcher)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["last"] == ["done"] and answer["running"] and answer["seen"][-1] == 8 * 35
    assert len(set(answer["seen"])) > 2  # it really read in between
    assert check_rows(tmp_path) == 8 * 35
