"""Damaged files of jobs, runs and sessions: each is reported in one sentence, and everything else keeps working."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from binade.app.sessions.log import Note, Rename
from binade.app.sessions.session import View, new
from binade.app.sessions.storage import append, create, list_sessions
from binade.cli import main
from binade.collector import jobs
from binade.collector.cli.options import parse
from binade.collector.jobs import directory, queue, runner
from binade.collector.jobs.processes import Process, host
from binade.data.run.directory import boot, list_runs
from binade.data.run.events import Event, EventKind, append_event
from binade.data.run.json_files import write_json
from tests.app import roots
from tests.app.conftest import close_pages, open_page
from tests.siege.attack import Attempt, attack, check_sentence

GONE = Process(1 << 22, 1.0)  # no process has this number
LINE = ("run", "--layers", "1", "--micro-batch-size", "1", "--sequence-length", "64", "--scores", "")
# What may stand where any value is expected.
VALUES: tuple[Any, ...] = (
    [1], {}, {"pid": 1}, None, True, -1, -999, 0, 10**30, 1e308, float("nan"), "", "x", "a\0b", "../../x", "--help",
    "2026-13-01", "9" * 5000, "<script>", [[]] * 50, "\u202e",
)  # fmt: skip
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "half": b'{"id": ',
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "binary": random.Random(0).randbytes(4000),
    "not UTF-8": b'{"id": "\xff\xfe"}',
    "a mark": b"\xef\xbb\xbf{}",
    "a long number": b'{"id": ' + b"9" * 100_000 + b"}",
    "half a letter": b'{"id": "\\ud800"}',
    "a name twice": b'{"id": 1, "id": 2}',
}


def _huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _into(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": _into("/nowhere/at/all"),
    "a link to a device": _into("/dev/zero"),
    "a link to a terminal": _into("/dev/tty"),
    "a terabyte": _huge,
    "missing": lambda path: None,
}


def damages(names: list[str]) -> list[tuple[str, str]]:
    """(file, damage) for `damage`."""
    fields = ["a field is missing", "a field is added", *(f"a field {index}" for index in range(2 * len(VALUES)))]
    kinds = [*CONTENTS, *KINDS, "a byte is flipped", "cut"]
    return [(name, how) for name in names for how in (*kinds, *(fields if ".json" in name else ()))]


def damage(path: Path, how: str, chance: random.Random) -> str:
    """Damage a file; what was done to it."""
    before = path.read_bytes() if path.is_file() else b""
    if path.is_symlink() or path.exists():
        path.unlink()
    if how in KINDS:
        KINDS[how](path)
        return how
    if how in CONTENTS:
        path.write_bytes(CONTENTS[how])
        return how
    content = bytearray(before)
    try:
        record = json.loads(before.splitlines()[0] if path.suffix == ".jsonl" else before)
    except (ValueError, IndexError):
        record = {}
    if isinstance(record, dict):
        record.pop("crc32", None)  # which would be found to be wrong before anything else
    said = how
    if how == "cut":
        del content[chance.randrange(len(content) + 1) :]
    elif how == "a byte is flipped" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif isinstance(record, dict):
        parents = [record, *(value for value in record.values() if isinstance(value, dict) and value)]
        parent = chance.choice(parents)
        if how == "a field is added":
            parent["exit_status"] = -999
        elif parent:
            key = chance.choice(sorted(parent))
            if how == "a field is missing":
                del parent[key]
            else:
                parent[key] = VALUES[int(how.split()[-1]) % len(VALUES)]
            said = f"{key} is {str(parent.get(key, 'missing'))[:30]!r}"
        content = bytearray(json.dumps(record).encode())
    path.write_bytes(content)
    return said


def command(root: Path, *arguments: str) -> tuple[int, str, str]:
    """binade on this root in this process: its exit status, output and errors."""
    os.environ["TENSOR_SAVE_DIR"] = str(root)
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return status, texts[0], texts[1]


# Parts of pages that are laid out differently.
PARTS = (
    ("map", "map"), ("tensor", "why"), ("explore", "explore"), ("runs", "recipes"), ("runs", "cost"),
    ("runs", "table"), ("runs", "jobs"), ("runs", "collect"), ("notebook", "sessions"),
)  # fmt: skip


def show(root: Path, page: str, /, **query: str | list[str]) -> AppTest:
    """A page of the root, which must not have failed."""
    os.environ["TENSOR_SAVE_DIR"] = str(root)
    return open_page(page, query)


def ended_job(root: Path, title: str, exit_status: int = 1) -> jobs.Job:
    """A job that has ended, without a run."""
    (job,) = jobs.add_runs(root, parse(LINE).plans, titles=[title])
    (directory.directory_of(root, job) / directory.OUTPUT_FILE).write_text("iteration 0\n")
    runner.Runner(root)._settle(job, directory.Launch(host(), boot(), job.created, 1 << 40), exit_status)
    return job


def make_queue(root: Path) -> None:
    """Jobs 1 to 3, of which 2 was cancelled while it ran."""
    for title in ("first", "second", "third"):
        ended_job(root, title)
    directory.change_launch(root, jobs.find(root, 2), cancelled="2026-01-02")
    jobs.set_at_once(root, 2)
    queue.write_runner(root, GONE)


def copy_queue(made: Path, root: Path) -> Path:
    """The root of `make_queue` under another name; the directory of its second job."""
    shutil.copytree(made, root, dirs_exist_ok=True)
    return directory.directory_of(root, jobs.find(root, 2))


JOB_FILES = ["job.json", "launch.json", "status.json", "output.txt"]
QUEUE_FILES = ["queue.json", "runner.json", "runner.log"]


@attack(
    "Other jobs continue; the page, `jobs`, `jobs cancel` and the runner report the damaged one in one sentence",
    tries=400,
    share=0.7,
)
def damaged_jobs(attempt: Attempt) -> None:
    name, how = attempt.choose(damages([*JOB_FILES, *QUEUE_FILES]))
    root = attempt.place / "runs"
    second = copy_queue(attempt.once("queue", make_queue), root)
    done = damage((second if name in JOB_FILES else queue.folder(root)) / name, how, attempt.random)
    attempt.case = f"{name}: {done}"
    before = jobs.listing(root)
    problems = jobs.problems(root)
    assert {1, 3} <= {view.job.id for view in before} <= {1, 2, 3}
    for problem in problems:
        check_sentence(problem)
    named = any(problem.startswith(f"the job of run {second.name} is skipped") for problem in problems)
    gone = name == "job.json" and not named  # it is that of another run, or is not there
    assert named == (2 not in {view.job.id for view in before} and not gone)
    if how in (*CONTENTS, *KINDS) and name in JOB_FILES[:3]:
        assert named or how == "missing"
    status, out, err = command(root, "jobs")
    assert status == 0 and "first" in out and "third" in out and err.count("\n") == len(problems)
    status, _, err = command(root, "jobs", "cancel", "1")
    assert status == 2 and "there is nothing to cancel" in err
    worker = runner.Runner(root)
    worker._start = lambda job: None  # type: ignore[method-assign]  # it may be queued
    worker.turn()
    if attempt.number % 4 == 0:
        shown = show(root, "runs", view="jobs", job="2")
        assert len(shown.warning) >= bool(problems)


@attack("A link or file in place of `.jobs` or its locks is refused in one sentence and not followed", tries=25)
def linked_queues(attempt: Attempt) -> None:
    places = (".jobs", ".jobs/runner.lock", ".jobs/queue.lock", ".jobs/runner.log", "job")
    kinds = ("a link", "a file", "a FIFO", "a link to itself", "a link to nothing")
    place, how = attempt.choose([(place, how) for place in places for how in kinds])
    root, other = attempt.place / "runs", attempt.place / "other"
    attempt.case = f"{place} is {how}"
    second = copy_queue(attempt.once("queue", make_queue), root)
    target = second if place == "job" else root / place
    if target.is_dir():
        shutil.move(target, other)
    else:
        target.unlink(missing_ok=True)
        other.write_text("mine")
    if how == "a link":
        target.symlink_to(other)
    elif how == "a file":
        target.write_text("")
    else:
        KINDS[how](target)
    before = {path: path.read_bytes() for path in [other, *other.rglob("*")] if path.is_file()}
    views = jobs.listing(root)
    for problem in jobs.problems(root):
        check_sentence(problem)
    status, _, err = command(root, "jobs")
    assert status in (0, 1)
    if place == ".jobs":
        assert views == [] and err.count("\n") == 1
        status, _, err = command(root, "jobs", "add", *LINE)
        assert status == 1 and err.count("\n") == 1
    show(root, "runs", view="jobs")
    worker = runner.Runner(root)
    worker._start = lambda job: None  # type: ignore[method-assign]
    worker.turn()
    assert {path: path.read_bytes() for path in [other, *other.rglob("*")] if path.is_file()} == before


RUN_FILES = ["run.json", "status.json", "loss.jsonl", "log.txt", "events.jsonl"]


@attack("Every page opens; intact runs are shown, and the damaged one is shown or reported", tries=150, share=3.0)
def damaged_runs(attempt: Attempt) -> None:
    name, how = attempt.choose(damages(RUN_FILES))
    root = roots.copy(attempt.root, attempt.place / "runs")
    run, *others = roots.runs_of(root)
    copy_queue(attempt.once("queue", make_queue), root)
    info = list_runs(root)[0][0]
    job = jobs.find(root, 3)
    started = str(info.config["started"])
    write_json(info.directory / "job.json", replace(job, run_id=info.run_id))  # the run is that of the third job
    shutil.copy(directory.directory_of(root, job) / "launch.json", info.directory)
    shutil.rmtree(directory.directory_of(root, job))
    for other in others:  # a batch is one process: only the first run is this job's
        roots.change_status(other, pid=1 << 22)
    append_event(run, Event(EventKind.TRIGGER, 0, "absmax is 9", started, place="layer1.fc1 input", order=1))
    done = damage(run / name, how, attempt.random)
    attempt.case = f"{name}: {done}"
    found, refused = list_runs(root)
    assert len(found) + len(refused) == len(others) + 1 and len(refused) <= 1
    for sentence in refused:
        check_sentence(sentence)
    status, out, err = command(root, "jobs")
    assert status == 0 and ("third" in out) != bool(err) and err.count("\n") <= 1
    status, _, err = command(root, "compare")
    assert status in (0, 1, 2) and "Traceback" not in err and err.count("\n") <= 3
    try:
        for page, part in (("runs", "jobs"), attempt.choose(PARTS)):
            attempt.case = f"{name}: {done}; page {page}, {part}"
            show(root, page, view=part, **({"job": "3"} if part == "jobs" else {}))
    finally:
        close_pages([str(root)])


SEGMENT_FILES = ["tensor.parquet", "sketch.parquet", "score.parquet"]


@attack("Pages open and report segments and tensor files that are not regular files", tries=40)
def odd_segments(attempt: Attempt) -> None:
    how = attempt.choose([*KINDS, *CONTENTS])
    root = roots.copy(attempt.root, attempt.place / "runs")
    run = roots.runs_of(root)[0]
    path = attempt.random.choice([min((run / "segments").iterdir()) / name for name in SEGMENT_FILES])
    tensor = next(iter(sorted((run / "tensors").rglob("*.pt"))))
    attempt.case = f"{path.name}: {how}"
    damage(path, how, attempt.random)
    damage(tensor, how, attempt.random)
    try:
        shown = show(root, attempt.choose(["map", "explore", "tensor"]))
        assert shown.expander, "nothing is said of it"
    finally:
        close_pages([str(root)])


def make_session(root: Path) -> None:
    one = create(root, new("a session", View("explore", {}))).session
    append(root, one.id, Rename("another name"))
    append(root, one.id, Note("notes", ""))


@attack("The page *Notebook* opens and reports the damaged file", tries=120)
def damaged_sessions(attempt: Attempt) -> None:
    root = attempt.place / "runs"
    shutil.copytree(attempt.once("session", make_session), root)
    (path,) = (root / ".sessions").glob("*.jsonl")
    _, how = attempt.choose(damages([path.name]))
    attempt.case = damage(path, how, attempt.random)
    found, problems = list_sessions(root)
    for problem in problems:
        check_sentence(problem)
    assert len(found) <= 1 and (found or problems or how == "missing")
    try:
        shown = show(root, "notebook")
        assert bool(problems) == bool(shown.warning), (problems, shown.warning)
    finally:
        close_pages([str(root)])


@attack("For a root that is a file or cannot be read, every page shows one sentence", tries=12, seconds=60)
def odd_roots(attempt: Attempt) -> None:
    how = attempt.choose(["a file", "a FIFO", "a link to itself", "a link to nothing", "a link to a device"])
    page, part = attempt.choose(PARTS)
    root = attempt.place / "runs"
    attempt.case = f"{page}, {part}: {how}"
    if how == "a file":
        root.write_text("")
    else:
        KINDS[how](root)
    shown = show(root, page, view=part)
    said = [each.value for each in (*shown.error, *shown.warning, *shown.info) if "must be a directory" in each.value]
    assert len(said) == 1
    check_sentence(said[0])
    for line in (["jobs"], ["compare"], ["jobs", "add", *LINE], ["bundle", "list"]):
        status, _, err = command(root, *line)
        assert status in (0, 1, 2) and "Traceback" not in err and err.count("\n") <= 2, (line, err[:200])
