"""kill -9 of any writing process, at any moment: no row is lost, no row names a missing file, leftovers are deleted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import zipfile
import zlib
from pathlib import Path

import torch

from binade.app.sessions.session import RunReference, View, new
from binade.app.sessions.storage import create
from binade.data.index.catalog import Catalog
from binade.data.run.directory import fingerprint, list_runs
from binade.data.run.losses import read_losses
from tests.app import roots
from tests.collector.test_failures import ENDLESS, check_rows
from tests.conftest import run_python, start_python
from tests.siege.attack import Attempt, attack

VARIES = re.compile(rb'Generated [^<]* UTC|binade report [^<"]*|"made": "[^"]*"')  # in a report


def killed(attempt: Attempt, longest: float, *line: str) -> bool:
    """Start a command and kill its session at a random moment within so many seconds of CPU time, most of them after it
    has imported everything. Whether it was killed before its end."""
    process = start_python("-m", "binade", *line, start_new_session=True)
    limit = attempt.random.uniform(0.1, longest)
    while process.poll() is None and _cpu(process.pid) < limit:
        time.sleep(0.01)
    over = process.poll() is not None
    if not over:
        os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    attempt.case = f"{line[0]}: killed after {limit:.2f} s" if not over else f"{line[0]}: ended within {limit:.2f} s"
    assert "Traceback" not in err, err[-300:]
    return not over


def _cpu(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def finish(*line: str) -> None:
    done = run_python("-m", "binade", *line, timeout=600)  # an attack ends sooner
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-300:]


def leftovers(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob(".*") if path.name.endswith((".part", ".old", ".gone"))]


def content(path: Path) -> dict[str, int]:
    """The checksum of every file in a folder or a ZIP file, without when and where it was written."""
    if path.is_file():
        found = {info.filename: info.CRC for info in zipfile.ZipFile(path).infolist()}
    else:
        files = [each for each in path.rglob("*") if each.is_file()]
        found = {str(each.relative_to(path)): zlib.crc32(VARIES.sub(b"", each.read_bytes())) for each in files}
    return {name: 0 if name.startswith(".sessions/") else crc for name, crc in found.items()}


@attack("Every published row is present with its values; the run is reported as crashed", tries=24)
def killed_collectors(attempt: Attempt) -> None:
    root = attempt.place / "runs"
    killed(attempt, 9.0, *ENDLESS, "--tensor-save-dir", str(root))
    runs, refused = list_runs(root)
    assert refused == [] and [run.status.state for run in runs] in ([], ["crashed"])
    if runs:
        assert check_rows(root, files_too=False) >= runs[0].status.tensors


def make_logs(place: Path) -> None:
    for index in range(60):
        torch.save(torch.randn(16, 64), place / f"x{index:02d}.pt")


@attack("Repeating the import gives every tensor once and leaves no temporary files", tries=16)
def killed_imports(attempt: Attempt) -> None:
    root, logs = attempt.place / "runs", attempt.once("logs", make_logs)
    line = ("import", str(logs), "--scores", "mxfp8", "--workers", "1", "--tensor-save-dir", str(root))
    killed(attempt, 5.0, *line)
    before = _names(root)
    finish(*line)
    assert sorted(_names(root)) == sorted(path.stem for path in logs.iterdir()) and set(before) <= set(_names(root))
    assert leftovers(root) == []


@attack("Losses never have the settings of another import; repeating the import completes it", tries=12)
def killed_reimports(attempt: Attempt) -> None:
    root, log = attempt.place / "runs", attempt.place / "losses.csv"
    line = ("import", str(log), "--tensor-save-dir", str(root), "--recipe")
    log.write_text("step,loss\n" + "".join(f"{step},4\n" for step in range(20_000)))
    finish(*line, "mxfp4")
    log.write_text("step,loss\n" + "".join(f"{step},8\n" for step in range(20_000)))
    killed(attempt, 3.0, *line, "mxfp8")
    (run,), refused = list_runs(root)
    losses = {record["loss"] for record in read_losses(run.directory)}
    assert not refused and losses == {int(run.config["recipe"][-1])}
    finish(*line, "mxfp8")
    (run,), _ = list_runs(root)
    assert {record["loss"] for record in read_losses(run.directory)} == {8} and leftovers(root) == []


def _names(root: Path) -> list[str]:
    with Catalog.open(root) as catalog:
        assert not catalog.refused
        return list(catalog.tensors()["tensor_name"]) if catalog.totals().tensors else []


@attack("Repeating the command writes the complete output and leaves no temporary files", tries=16, seconds=400)
def killed_writers(attempt: Attempt) -> None:
    """An export, a bundle and its import."""
    out = attempt.place / "out"

    def make(place: Path) -> None:
        root = roots.copy(attempt.root, place / "runs")
        runs = roots.runs_of(root)[:2]
        shown = tuple(RunReference(run.name, fingerprint(run)) for run in runs)
        session = create(root, new("mine", View("explore", {}), runs=shown)).session
        (place / "session").write_text(session.id)
        finish("bundle", "export", session.id, "--output", str(place / "b.zip"), "--tensor-save-dir", str(root))

    made = attempt.once("source", make)
    session, source = (made / "session").read_text(), ("--tensor-save-dir", str(made / "runs"))
    name, line = attempt.choose(
        [
            ("csv", ("export", "--to", "csv", *source, "--output")),
            ("parquet", ("export", "--to", "parquet", *source, "--output")),
            ("bundle", ("bundle", "export", session, *source, "--output")),
            ("import", ("bundle", "import", str(made / "b.zip"), "--tensor-save-dir")),
        ]
    )
    whole = attempt.once(name, lambda place: finish(*line, str(place / "whole"))) / "whole"
    line = (*line, str(out))
    killed(attempt, 4.0, *line)
    if out.is_file():
        assert zipfile.ZipFile(out).testzip() is None
        out.unlink()
    elif line[0] == "export" and out.exists():  # it appears when it is whole, and is not replaced
        assert any(out.iterdir())
        shutil.rmtree(out)
    finish(*line)
    assert leftovers(attempt.place) == [] and content(out) == content(whole)


@attack("Repeating the report gives a complete report and leaves no temporary files", tries=4, seconds=600)
def killed_reports(attempt: Attempt) -> None:
    out = attempt.place / "out"
    few = ("--recipe", "mxfp4", "--layer-index", "1", "--tensor-name", "weight", "--jobs", "1")
    line = ("report", "--output", str(out), *few, "--tensor-save-dir", str(attempt.root))
    whole = attempt.once("whole", lambda place: finish(*line[:2], str(place / "out"), *line[3:])) / "out"
    killed(attempt, 12.0, *line)
    finish(*line)
    assert leftovers(attempt.place) == [] and content(out) == content(whole)
