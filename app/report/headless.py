"""binade report: every chart of a root or a filter as files, without a browser.

    draw/index.html            the frozen report
    draw/quick_analysis.png    all values, by quant type, layer type and operation
    draw/tensor_stats.txt, tensor_stats.json
    draw/distributions/  heatmaps/  comparisons/  statistics/  hifp8/  attention_maps/
    draw/report.json           what was drawn from what, and the list of these files

Of a session: pins/ and view/ in place of the folders above.

Everything is made aside and then moved into place, index.html last. A folder that is there keeps what is in it: files
that an earlier report wrote (its report.json names them) are replaced or removed, and a file that none wrote is never
touched: it is an error that names it, before anything is moved.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from altair.utils.schemapi import disable_debug_mode

from binade.app.formatting import big, bytes_text
from binade.app.report import contents, frozen, stats
from binade.app.report import sessions as session_parts
from binade.app.report.archive import Archive
from binade.app.report.painting import Painted, PaintError, Painters
from binade.app.report.plates import Part, Plate, Report
from binade.app.sessions import storage
from binade.app.sessions.session import Session, SessionError
from binade.app.theme import THEMES
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.store import staged_file, write_atomic

__all__ = ["PaintError", "ReportError", "Request", "SessionError", "UsageError", "no_room", "run"]

MANIFEST = "report.json"
ALWAYS = (MANIFEST, "index.html", "tensor_stats.json", "tensor_stats.txt")  # in every report
FOLDERS = ("distributions", "heatmaps", "comparisons", "statistics", "hifp8", "attention_maps")
SESSION_FOLDERS = ("pins", "view")
Progress = Callable[[int, int, str], None]


class ReportError(RuntimeError):
    """The report cannot be made. The message says why and what to do."""


class UsageError(ReportError):
    """What was asked for makes no sense."""

    exit_status = 2


@dataclass(frozen=True)
class Request:
    """What is asked for. archive: a ZIP of the report as well; command: how it was asked for; session: the id of a
    saved session, whose view, pins and notes are then drawn in place of the filter's charts."""

    output: Path
    where: Filter
    archive: Path | None = None
    theme: str = "light"
    jobs: int | None = None
    command: str = ""
    session: str | None = None


def make(opened: Catalog, request: Request, progress: Progress) -> int:
    """Draw the report; returns how many charts it has. Raises ReportError, OSError; nothing is left half-written."""
    _check(opened, request)
    session = storage.load(opened.root, request.session).session if request.session else None
    if session:
        request = replace(request, where=session_parts.filter_of(opened, session))
    before = _written_before(request.output)
    folders = SESSION_FOLDERS if request.session else FOLDERS
    _refuse_foreign(request.output, ALWAYS, before, folders)  # the usual case is told before the work
    with Aside(request.output) as aside:
        drawn = _draw(opened, request, session, aside, progress)
        aside.publish(before)
        if request.archive:
            _place(aside.archive, request.archive)
    return drawn


def _place(made: Path, target: Path) -> None:
    """Move a file to its place, on another disk too: it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)  # within the report
    with open(made, "rb") as content, staged_file(target) as file:
        shutil.copyfileobj(content, file)


def _check(opened: Catalog, request: Request) -> None:
    if not opened.totals().tensors:
        found = "holds no recorded tensor" if opened.root.is_dir() else "does not exist"
        advice = "name the root of some runs with --tensor-save-dir, or collect one with binade quick mxfp8"
        raise ReportError(f"{opened.root} {found}: {advice}")
    if not opened.totals(request.where).tensors:
        raise ReportError(f"no tensor matches: {request.where.sentence()}; take something out of the filter")
    if not request.output.absolute().name:
        raise UsageError(f"{request.output} is no folder for a report: give --output one of its own")
    if request.output.exists() and not request.output.is_dir():
        raise UsageError(f"{request.output} is a file: give --output a folder, new or of an earlier report")
    if request.archive is not None and request.archive.is_dir():
        raise UsageError(f"{request.archive} is a folder: give --zip a file's name")
    if request.archive is not None:
        _check_archive(request.archive.absolute(), request.output.absolute())


def _check_archive(archive: Path, output: Path) -> None:
    """Raise UsageError for a ZIP in a folder that is not there, but for the report's own, or by the name of one of the
    report's files."""
    within = archive.relative_to(output).parts if archive.is_relative_to(output) else ()
    if within and within[0] in (*ALWAYS, *FOLDERS, *SESSION_FOLDERS):
        raise UsageError(f"{archive} is a place of the report's own files: give --zip another name")
    if not within and not archive.parent.is_dir():
        raise UsageError(f"{archive.parent} is no folder: make it first, or give --zip a place that is there")


def _written_before(output: Path) -> set[str]:
    """The files that an earlier report wrote into the folder. Raises UsageError for a manifest that is none."""
    manifest = output / MANIFEST
    if not manifest.exists():
        return set()
    try:
        files = json.loads(manifest.read_bytes())["files"]
        names = {name for name in files if isinstance(name, str)}
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{manifest} is no report's: give --output another folder, or move that file away") from None
    inside = (PurePosixPath(name) for name in names)
    return {str(path) for path in inside if not path.is_absolute() and ".." not in path.parts}


def _refuse_foreign(output: Path, files: Iterable[str], before: set[str], folders: Iterable[str] = ()) -> None:
    """Raise UsageError if one of the files is there and not from an earlier report, or is a folder, or if one of the
    folders, which may be theirs, is no folder."""
    files = list(files)
    foreign = {name for name in files if (_is_there(output / name) and name not in before) or (output / name).is_dir()}
    wanted = {*folders, *(str(parent) for name in files for parent in PurePosixPath(name).parents[:-1])}
    foreign |= {name for name in wanted if _is_there(output / name) and not (output / name).is_dir()}
    if foreign:
        raise UsageError(
            f"{output / min(foreign)} is there and no report wrote it: give --output another folder, or move it"
        )


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


class Aside:
    """A folder beside the output, filled and then moved into it; gone afterwards, whatever happened, with the folders
    above it that were made for it and are empty. archive: where a ZIP can be made."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._all = output.absolute().with_name(f".{output.absolute().name}.{os.getpid()}.part")
        self._above = [folder for folder in self._all.parents if not folder.exists()]
        self.folder, self.archive = self._all / "report", self._all / "report.zip"
        self.files: list[str] = []

    def __enter__(self) -> Aside:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._all, ignore_errors=True)
        with suppress(OSError):  # not empty: the report is there
            for folder in self._above:
                folder.rmdir()

    def write(self, name: str, content: bytes | str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.files.append(name)

    def publish(self, before: set[str]) -> None:
        """Move everything into place. Raises UsageError, before anything is moved, where that would replace a file
        that no report wrote."""
        _refuse_foreign(self.output, self.files, before)
        if not self.output.exists():
            os.replace(self.folder, self.output)
            return
        # Until all is in place, the manifest names the old files and the new ones: who is broken off can begin again.
        manifest = json.loads((self.folder / MANIFEST).read_bytes())
        either = manifest | {"files": sorted({*manifest["files"], *before})}
        write_atomic(self.output / MANIFEST, json.dumps(either).encode())
        for name in sorted(set(self.files) - {MANIFEST}, key=lambda name: (name == "index.html", name)):
            (self.output / name).parent.mkdir(exist_ok=True)
            os.replace(self.folder / name, self.output / name)
        for old in (self.output / name for name in before - set(self.files)):
            if old.is_file() or old.is_symlink():
                old.unlink()
        os.replace(self.folder / MANIFEST, self.output / MANIFEST)


def _draw(opened: Catalog, request: Request, session: Session | None, aside: Aside, progress: Progress) -> int:
    where, theme = request.where, THEMES[request.theme]
    if session:
        parts = session_parts.parts(opened, session, request.command)
        title, notes = session.name, session_parts.notes_html(session)
    else:
        parts, title, notes = contents.parts(opened, where, request.command), "", ""
    with ExitStack() as stack:
        archive = stack.enter_context(Archive(aside.archive)) if request.archive else None
        with Painters(request.jobs) as painters:
            bundle = painters.bundle()
            found: list[Part] = []
            waiting: list[tuple[Plate, Future[Painted]]] = []
            done = total = 0

            def collect(most: int) -> None:
                nonlocal done
                while len(waiting) > most:
                    plate, future = waiting.pop(0)
                    _keep(aside, archive, plate, future.result())
                    done += 1
                    progress(done, total, plate.path)

            for part in parts:
                found.append(part)
                quick = contents.quick(part) if part.name == "overview" else None
                drawn = [*([Plate("quick_analysis", quick)] if quick else []), *part.plates]
                total += len(drawn)
                for plate in drawn:
                    waiting.append((plate, painters.paint(plate.figure, plate.spec, theme)))
                    collect(4 * painters.jobs)
            collect(0)
            report = describe(opened, where, tuple(found), title, notes, archive is not None)
            html = frozen.page(report, bundle.result())
        numbers = stats.tensor_stats(opened, where)
        texts = {
            "tensor_stats.json": stats.strict_json(numbers),
            "tensor_stats.txt": stats.as_text(numbers, where.sentence()),
            "index.html": html,
        }
        for name, text in texts.items():
            aside.write(name, text)
            if archive:
                archive.add(name, text)
        if archive:
            for part in found:
                for table in part.tables:
                    archive.table(table)
        aside.write(MANIFEST, _manifest(opened, request, aside.files))
    return total


def _keep(aside: Aside, archive: Archive | None, plate: Plate, painted: Painted) -> None:
    if plate.path.partition("/")[0] != "overview":  # quick_analysis.png holds these
        aside.write(f"{plate.path}.png", painted.png)
    if archive:
        archive.plate(plate, painted)


def describe(
    opened: Catalog,
    where: Filter,
    parts: tuple[Part, ...],
    title: str = "",
    notes: str = "",
    archived: bool = False,
) -> Report:
    """The report of these parts. notes: HTML that was made safe; archived: whether a ZIP is made as well."""
    totals = opened.totals(where)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = (
        ("Tensors", f"{totals.tensors:,}"),
        ("Values", big(totals.elements)),
        ("With values on disk", f"{totals.with_values:,}"),
        ("Size", bytes_text(totals.nbytes)),
        ("Runs", f"{totals.runs:,}"),
    )
    subtitle = f"Made {made} from {opened.root.name}. Shown: {where.sentence()}."
    return Report(title or f"Tensors of {opened.root.name}", subtitle, facts, parts, notes, archived)


def _manifest(opened: Catalog, request: Request, files: list[str]) -> str:
    content = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "root": opened.root.name,
        "filter": request.where.to_dict(),
        "command": request.command,
        "files": sorted([*files, MANIFEST]),
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def run(root: Path, request: Request) -> int:
    """As `make`, told on stderr; returns the exit status but for KeyboardInterrupt. Raises ReportError, OSError."""
    disable_debug_mode()  # the tests hold every chart to Vega-Lite's schema
    start = time.monotonic()
    with Catalog.open(root) as opened:
        for reason in opened.refused:
            print(f"binade: passed over: {reason}", file=sys.stderr)
        with Line() as line:
            charts = make(opened, request, line.show)
    seconds = time.monotonic() - start
    print(f"{request.output / 'index.html'}: {charts} charts in {seconds:.1f} s")
    if request.archive:
        print(request.archive)
    return 0


class Line:
    """A line of progress on stderr: rewritten in place on a terminal, else one line a folder."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = ""

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, done: int, total: int, name: str) -> None:
        folder = name.partition("/")[0]
        if self._live:
            print(f"\r\x1b[K{done} of {total} charts so far · {name}"[:100], end="", file=sys.stderr, flush=True)
        elif folder != self._last:
            print(f"{done} of {total} charts so far · {folder}", file=sys.stderr, flush=True)
        self._last = folder


def no_room(error: OSError) -> str:
    """An OSError as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: nothing of the report was kept; free some space or give another --output"
    return f"{error.filename or 'the report'} cannot be written: {error.strerror or error}"
