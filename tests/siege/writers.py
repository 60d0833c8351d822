"""Two threads or two processes that write the same file at the same time, for every file that several may write."""

from __future__ import annotations

import shutil
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from binade.app.jobs import saved_recipes
from binade.app.report import writer as reports
from binade.app.sessions import session as sessions
from binade.app.sessions import storage
from binade.app.sessions.log import Add, Caption, Delete, Move, Restore
from binade.app.sessions.session import Pin
from binade.app.view.view import View
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.jobs import directory, queue
from binade.collector.jobs.processes import boot, host
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.data.run.directory import RunNotes, list_runs, read_run
from binade.data.run.events import Event, EventKind, append_event, read_events
from binade.data.run.losses import read_losses
from binade.data.run.run_notes import change_notes, read_notes
from binade.data.run.run_writer import RunWriter
from tests.siege.attack import Attempt, attack
from tests.siege.files import LINE
from tests.siege.kills import leftovers

SESSION = sessions.new("shared", View("runs"))
FIELDS = ("name", "note")


@dataclass(frozen=True)
class Writer:
    """write(place, who, turn) is what two writers do, read(place) what a third does meanwhile, and check(place, turns)
    is called after all writes: both raise if something is damaged, torn or lost."""

    prepare: Callable[[Path], object]
    write: Callable[[Path, int, int], object]
    read: Callable[[Path], object]
    check: Callable[[Path, int], object]


def _run(place: Path) -> None:
    RunWriter.create(place, "run", {}, ranks=2)


def _directory(place: Path) -> Path:
    (run,) = [path for path in place.iterdir() if path.name.endswith("run", 0, -7)]
    return run


def _name(place: Path, who: int, turn: int) -> None:
    field = FIELDS[who]
    seen = read_notes(_directory(place))
    change_notes(_directory(place), RunNotes(**{field: f"{turn} " * 20}), RunNotes(**{field: getattr(seen, field)}))


def _named(place: Path, turns: int) -> None:
    notes = read_notes(_directory(place))
    assert [getattr(notes, field).split() for field in FIELDS] == [[f"{turns - 1}"] * 20] * 2


def _facts(place: Path, turns: int) -> None:
    config = read_run(_directory(place)).config
    assert all(config[f"fact{who}_{turn}"] == turn for who in range(2) for turn in range(turns))


def _count(place: Path, who: int, turn: int) -> None:
    """A rank's counts; rank 0 also writes the status."""
    RunWriter.join(_directory(place), who, 2).update(tensors=turn + 1)


def _counted(place: Path, turns: int) -> None:
    assert RunWriter.join(_directory(place), 0, 2).status and read_run(_directory(place)).status.tensors <= 2 * turns


def _event(place: Path, who: int, turn: int) -> None:
    append_event(_directory(place), Event(EventKind.WARNING, turn, f"{who} {turn} " + "x" * 3000, "2026-01-01"))
    RunWriter.join(_directory(place), 0, 2).append_loss({"iteration": turn, "loss": float(who)})


def _events(place: Path, turns: int) -> None:
    texts = {" ".join(event.text.split()[:2]) for event in read_events(_directory(place))}
    assert texts == {f"{who} {turn}" for who in range(2) for turn in range(turns)}
    assert len(read_losses(_directory(place))) == 2 * turns


def _pin(place: Path, who: int, turn: int) -> None:
    """Two tabs of a session: each pins, moves and deletes, and writes at what the other may have deleted."""
    added = Add(Pin("map", {}, caption=f"{who} {turn}"))
    storage.append(place, SESSION.id, added)
    storage.append(place, SESSION.id, Move(added.pin_id, None))
    first = storage.load(place, SESSION.id).state.pins[0].pin_id
    storage.append(place, SESSION.id, Delete(first))
    storage.append(place, SESSION.id, Caption(first, "seen"))
    storage.append(place, SESSION.id, Restore(first))
    storage.append(place, SESSION.id, Caption(added.pin_id, f"{who} {turn} at last"))


def _pins(place: Path, turns: int) -> None:
    saved = storage.load(place, SESSION.id)
    captions = {pin.caption for pin in saved.session.pins}
    assert saved.problems == () and len(saved.session.pins) == 2 * turns
    assert captions - {"seen"} <= {f"{who} {turn} at last" for who in range(2) for turn in range(turns)}


def _job(place: Path, who: int, turn: int) -> None:
    """Two users: one sets how many run at once, the other adds jobs and writes how one was started."""
    if who:
        jobs.set_at_once(place, 1 + turn % 5)
    else:
        add_line(place, LINE)
        with queue.locked(place):
            directory.write_launch(place, queue.find(place, 1), directory.Launch(host(), boot(), "2026-01-01"))
    with queue.locked(place):
        directory.change_launch(place, queue.find(place, 1), cancelled=f"2026-01-0{1 + who}")


def _jobs(place: Path, turns: int) -> None:
    launch = directory.read_launch(place, queue.find(place, 1))
    assert launch and launch.cancelled
    assert [each.id for each in queue.read_jobs(place)] == list(range(1, turns + 2)) and queue.at_once(place) == 1 + (
        turns - 1
    ) % 5


def _recipe(place: Path, who: int, turn: int) -> None:
    """Of two that save a new recipe under one name, one is told that it exists."""
    path = saved_recipes.path_of(place, f"r{turn}")
    try:
        saved_recipes.save(path, to_toml(parse_recipe(("mxfp8", "mxfp4")[who])))
        (place / f"saved {turn} {who}").touch()
    except RecipeError:
        (place / f"refused {turn} {who}").touch()
    saved_recipes.save(path, to_toml(parse_recipe("nvfp4")), replace=True)


def _recipes(place: Path, turns: int) -> None:
    for kind in ("saved", "refused"):
        assert len([*place.glob(f"{kind} *")]) == turns


def _report(place: Path, who: int, turn: int) -> None:
    """Each report has files of its own, and an index that belongs to them."""
    made = place / f"made{who}"
    (made / "charts").mkdir(parents=True)
    files = ["index.html", f"charts/{who}.png", "report.json"]
    for name in files[:2]:
        (made / name).write_text(f"{who}")
    (made / reports.MANIFEST).write_text(reports.json.dumps({"files": files}))
    reports.publish(made, place / "report", set())
    shutil.rmtree(made, ignore_errors=True)


def _reported(place: Path, turns: int) -> None:
    who = (place / "report" / "index.html").read_text()
    assert [path.name for path in (place / "report" / "charts").iterdir()] == [f"{who}.png"]


def _nothing(place: Path) -> None:
    pass


WRITERS = {
    "notes of a run": Writer(_run, _name, lambda place: read_notes(_directory(place)), _named),
    "run.json": Writer(
        _run,
        lambda place, who, turn: RunWriter.join(_directory(place), 0, 1).describe({f"fact{who}_{turn}": turn}),
        lambda place: read_run(_directory(place)),
        _facts,
    ),
    "counts of ranks": Writer(_run, _count, lambda place: read_run(_directory(place)), _counted),
    "events and losses": Writer(_run, _event, _nothing, _events),
    "session": Writer(
        lambda place: storage.create(place, SESSION),
        _pin,
        lambda place: storage.load(place, SESSION.id),
        _pins,
    ),
    "queue": Writer(lambda place: add_line(place, LINE), _job, lambda place: queue.find(place, 1), _jobs),
    "recipe": Writer(_nothing, _recipe, _nothing, _recipes),
    "report": Writer(_nothing, _report, _nothing, _reported),
}


def check_writers(name: str, place: Path, turns: int, processes: bool) -> None:
    """Two writers and a reader at once: no exception, no damaged file, no torn read, no lost update, no leftover."""
    writer = WRITERS[name]
    writer.prepare(place)
    kind = get_context("fork").Process if processes else threading.Thread
    failed = place.with_name(f"{place.name} failed")

    def write(who: int) -> None:
        try:
            for turn in range(turns):
                writer.write(place, who, turn)
        except BaseException:
            with open(failed, "a", encoding="utf-8") as file:
                file.write(traceback.format_exc())

    writers = [kind(target=write, args=(who,)) for who in range(2)]
    for one in writers:
        one.start()
    while any(one.is_alive() for one in writers):
        writer.read(place)
    for one in writers:
        one.join()
    assert not failed.exists(), failed.read_text(encoding="utf-8")
    writer.check(place, turns)
    list_runs(place)
    assert leftovers(place) == []


@attack(
    "Two threads or processes write one file at once: no exception, damaged file, torn read, lost update or leftover",
    tries=60,
)
def writers_at_once(attempt: Attempt) -> None:
    name, processes = attempt.choose([(name, processes) for name in WRITERS for processes in (False, True)])
    attempt.case = f"{name}: {'processes' if processes else 'threads'}"
    check_writers(name, attempt.place, 50, processes)
