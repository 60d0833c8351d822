"""binade report: every chart of a root or a filter as files, without a browser.

    draw/index.html            the report as one page
    draw/quick_analysis.png    the values of all tensors, and those by quant type, layer type and operation
    draw/tensor_stats.txt, tensor_stats.json
    draw/distributions/ heatmaps/ comparisons/ attention_maps/ statistics/ …
                               the charts, a folder for each question, and one for statistics: SVG, and their numbers
                               as CSV
    draw/tables/ …             the tables as CSV
    draw/report.json           what was drawn from what, and the list of these files

A root that has losses alone has no quick_analysis.png, and the folders of the questions about losses. A session's
report has pins/ and view/ instead of these folders. --paper adds NAME-84mm.svg and .pdf to each chart.

All files are made in a staging directory and then moved into place, index.html last. In a folder that exists, the files
of an earlier report (its report.json names them) are replaced or removed. A file that no report wrote is never touched:
if one is in the way, the error names it, and nothing is moved.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os.path import lexists
from pathlib import Path, PurePosixPath
from typing import Any

from altair.utils.schemapi import disable_debug_mode

from binade.app.draw import exports
from binade.app.draw.figure import Figure
from binade.app.draw.formatting import big, bytes_text
from binade.app.draw.theme import THEMES
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.runs import matching
from binade.app.report import contents, overview, sessions, stats
from binade.app.report.overview import QUICK, STATISTICS
from binade.app.report.page import of_page, page
from binade.app.report.rendering import Paper, Picture, RenderError, Renderers, as_png
from binade.app.report.section import Section, merged
from binade.app.sessions import notes, storage
from binade.app.sessions.session import Session, SessionError
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from binade.data.index.opened import OutdatedError
from binade.data.run.store import locked, read_file, staging_directory, sweep_beside, write_atomic
from binade.data.words.filter import Filter

__all__ = ["RenderError", "ReportError", "ReportRequest", "SessionError", "UsageError", "no_room", "run"]

REMEMBERED = 96 << 20  # bytes of answers and tensors that several charts are drawn from
MANIFEST = "report.json"
# In every report; the picture only in one of finite values.
ALWAYS = (MANIFEST, "index.html", "tensor_stats.json", "tensor_stats.txt", f"{QUICK}.png")
TABLES = "tables"
FOLDERS = (*(contents.folder(question) for question in QUESTIONS), STATISTICS, TABLES)
SESSION_FOLDERS = ("pins", "view", TABLES)
Progress = Callable[[int, int, str], None]


class ReportError(RuntimeError):
    """The report cannot be made. The message says why and what to do."""


class UsageError(ReportError):
    """The request cannot be fulfilled as given."""

    exit_status = 2


@dataclass(frozen=True)
class ReportRequest:
    """What to draw. command: the command line of the request; session: the id of a saved session whose view, pins and
    notes are drawn instead of the filter's charts; papers: the widths of exports.COLUMNS in which to draw each chart
    for a paper."""

    output: Path
    where: Filter
    theme: str = "light"
    jobs: int | None = None
    command: str = ""
    session: str | None = None
    papers: tuple[str, ...] = ()


def make(opened: Catalog, request: ReportRequest, progress: Progress) -> int:
    """Draw the report; returns how many charts it has. Raises ReportError, OSError; nothing is left half-written."""
    _check(opened, request)
    opened.cache = opened.cache or ResultCache(REMEMBERED, outside=(Catalog,))
    session = storage.load(opened.root, request.session).session if request.session else None
    if session:
        request = replace(request, where=sessions.filter_of(opened, session))
    before = _written_before(request.output)
    folders = SESSION_FOLDERS if session else FOLDERS
    _refuse_foreign(request.output, ALWAYS, before, folders)  # the usual case, before the work
    output = request.output.absolute()
    sweep_beside(output)
    with staging_directory(output) as staging:
        made = staging / "report"
        made.mkdir()
        with _unchanged(opened), opened.snapshot():
            charts = _draw(opened, request, session, Files(made), progress)
        publish(made, request.output, before)
    return charts


@contextmanager
def _unchanged(opened: Catalog) -> Iterator[None]:
    """Raise ReportError if the indexed runs change: the charts would not all show the same runs."""
    version = opened.version
    changed = f"the runs in {opened.root} changed while the report was being generated: run the command again"
    try:
        yield
    except Exception as error:
        if opened.version == version and not isinstance(error, OutdatedError):
            raise
        raise ReportError(changed) from error
    if opened.version != version:
        raise ReportError(changed)


def _check(opened: Catalog, request: ReportRequest) -> None:
    runs = opened.runs()
    if not opened.totals().tensors and runs["first_step"].isna().all():
        advice = "give a directory of runs with --tensor-save-dir, or collect a run with binade quick mxfp8"
        raise ReportError(f"{opened.root} contains neither recorded tensors nor losses: {advice}")
    if not opened.totals(request.where).tensors and matching(opened, request.where, runs).empty:
        raise ReportError(f"no tensor matches: {request.where.sentence()}; remove something from the filter")
    if not request.output.absolute().name:
        raise UsageError(f"{request.output} cannot be used for a report: choose a separate directory for --output")
    if request.output.exists() and not request.output.is_dir():
        raise UsageError(
            f"{request.output} is a file: give --output a new folder, or one that contains an earlier report"
        )


def _written_before(output: Path) -> set[str]:
    """The files that an earlier report wrote into the folder. Raises UsageError for an invalid manifest."""
    manifest = output / MANIFEST
    if not manifest.exists():
        return set()
    try:
        files = json.loads(read_file(manifest))["files"]
        names = {name for name in files if isinstance(name, str)}
    except (ValueError, KeyError, TypeError):
        advice = "choose another folder for --output, or move that file"
        raise UsageError(f"{manifest} was not written by a report: {advice}") from None
    inside = (PurePosixPath(name) for name in names)
    return {str(path) for path in inside if not path.is_absolute() and ".." not in path.parts}


def _refuse_foreign(output: Path, files: Iterable[str], before: set[str], folders: Iterable[str] = ()) -> None:
    """Raise UsageError if one of the files exists and is not from an earlier report or is a folder, or if one of the
    folders, or of those of an earlier report, exists and is a file or a link."""
    files = list(files)
    foreign = {name for name in files if (lexists(output / name) and name not in before) or (output / name).is_dir()}
    wanted = {*folders, *(str(parent) for name in {*files, *before} for parent in PurePosixPath(name).parents[:-1])}
    there = {name: output / name for name in wanted if lexists(output / name)}
    # A link can lead anywhere.
    foreign |= {name for name, path in there.items() if path.is_symlink() or not path.is_dir()}
    if foreign:
        raise UsageError(
            f"{output / min(foreign)} exists and was not written by a report: give --output another folder, or move it"
        )


def publish(made: Path, output: Path, before: set[str]) -> None:
    """Move a report's files into place. before: the files of an earlier report. Raises UsageError, before anything is
    moved, if that would replace a file that no report wrote."""
    manifest = json.loads((made / MANIFEST).read_bytes())
    files = set(manifest["files"])
    if not output.exists():
        try:
            os.rename(made, output)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another report was faster
                raise
    with locked(output, required=False):  # of two reports at once, the folder has all files of one
        before = before | _written_before(output)
        _refuse_foreign(output, files, before)
        _replace(made, output, manifest, files, before)


def _replace(made: Path, output: Path, manifest: dict[str, Any], files: set[str], before: set[str]) -> None:
    # Until all is in place, the manifest names the old files and the new ones: after an interruption, a new report can
    # replace both.
    write_atomic(output / MANIFEST, json.dumps(manifest | {"files": sorted(files | before)}).encode())
    for name in (*sorted(files - {"index.html", MANIFEST}), "index.html"):
        (output / name).parent.mkdir(exist_ok=True)
        os.replace(made / name, output / name)
    for old in (output / name for name in before - files):
        if old.is_file() or old.is_symlink():
            old.unlink()
    os.replace(made / MANIFEST, output / MANIFEST)


class Files:
    """Writes the files of a report into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def write(self, name: str, content: bytes | str) -> None:
        """Write a file into the folder."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.names.append(name)

    def write_figure(self, path: str, figure: Figure, picture: Picture, papers: Mapping[str, Paper]) -> None:
        self.write(f"{path}.svg", picture.svg)
        self.write(f"{path}.csv", figure.csv())
        for width, paper in papers.items():
            for kind, drawn in paper._asdict().items():
                self.write(f"{path}-{width}.{kind}", drawn)


def _write_texts(opened: Catalog, where: Filter, files: Files, html: str, sections: Sequence[Section]) -> None:
    """The page, the statistics and the tables."""
    numbers = stats.tensor_stats(opened, where)
    texts = {
        "tensor_stats.json": stats.strict_json(numbers),
        "tensor_stats.txt": stats.as_text(numbers, where.sentence()),
        "index.html": html,
    }
    for name, text in texts.items():
        files.write(name, text)
    for table in (table for section in sections for table in section.tables):
        files.write(f"{TABLES}/{table.name}.csv", exports.of_table(table.frame, ".csv"))


def _draw(opened: Catalog, request: ReportRequest, session: Session | None, files: Files, progress: Progress) -> int:
    where, command = request.where, request.command
    theme = THEMES[request.theme]
    contributions = (
        sessions.contributions(opened, session, command) if session else contents.contributions(opened, where, command)
    )
    unmerged: list[Section] = []
    waiting: deque[tuple[str, Figure, Future[Picture], dict[str, Future[Paper]]]] = deque()
    embedded: dict[str, str] = {}
    done = total = 0
    expected = len(session.pins) if session else 0
    with Renderers(request.jobs) as renderers:

        def collect(most: int) -> None:
            nonlocal done
            while len(waiting) > most:
                path, figure, picture, papers = waiting.popleft()
                drawn = picture.result()
                if path == QUICK:
                    files.write(f"{QUICK}.png", as_png(drawn.svg))
                else:
                    files.write_figure(path, figure, drawn, {width: paper.result() for width, paper in papers.items()})
                    embedded[path] = drawn.embedded
                done += 1
                progress(done, max(total, expected), path)

        bundle = renderers.bundle()
        recorded = not session and opened.totals(where).tensors
        if quick := overview.quick_analysis(opened, where) if recorded else None:
            waiting.append((quick.name, quick, exports.picture(renderers, quick, theme), {}))
            total += 1
        for one in contributions:
            unmerged.append(one)
            figures = {f"{one.name}/{figure.name}": figure for figure in one.figures}
            total += len(figures)
            for path, figure in figures.items():
                picture = exports.picture(renderers, figure, theme, of_page(figure))
                papers = {
                    width: renderers.paper(exports.paper_spec(figure, width), exports.COLUMNS[width])
                    for width in dict.fromkeys(request.papers)
                }
                waiting.append((path, figure, picture, papers))
                collect(4 * renderers.jobs)
        collect(0)
        sections = merged(unmerged)
        html = page(sections, embedded, bundle.result(), **_top(opened, where, session))
    _write_texts(opened, where, files, html, sections)
    files.write(MANIFEST, _manifest(opened, request, files.names))
    return total


def _top(opened: Catalog, where: Filter, session: Session | None) -> dict[str, object]:
    """The part of the page above its sections."""
    totals = opened.totals(where)
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {
        "title": session.name if session else f"Tensors of {opened.root.name}",
        "subtitle": f"Generated {made} from {opened.root.name}. Shown: {where.sentence()}.",
        "facts": (
            ("Tensors", f"{totals.tensors:,}"),
            ("Values", big(totals.elements)),
            ("With values on disk", f"{totals.with_values:,}"),
            ("Size", bytes_text(totals.nbytes)),
            ("Runs", _count_runs(opened, session) if session else f"{totals.runs:,}"),
        ),
        "notes": notes.to_html(session.notes) if session else "",
    }


def _count_runs(opened: Catalog, session: Session) -> str:
    shown = sessions.runs_of(opened, session)["shown"].value_counts()
    return " + ".join(f"{count:,} {kind}" for kind, count in shown.items())


def _manifest(opened: Catalog, request: ReportRequest, files: list[str]) -> str:
    content = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "root": opened.root.name,
        "filter": request.where.to_dict(),
        "command": request.command,
        "files": sorted([*files, MANIFEST]),
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def run(root: Path, request: ReportRequest) -> int:
    """As `make`, with progress on stderr. Returns the exit status, except for KeyboardInterrupt. Raises ReportError,
    OSError."""
    disable_debug_mode()  # the tests check every chart against Vega-Lite's schema
    start = time.monotonic()
    with Catalog.open(root) as opened:
        for reason in opened.refused:
            print(f"binade: skipped: {reason}", file=sys.stderr)
        with _progress_line() as progress:
            charts = make(opened, request, progress)
    seconds = time.monotonic() - start
    print(f"{request.output / 'index.html'}: {charts} charts in {seconds:.1f} s")
    return 0


@contextmanager
def _progress_line() -> Iterator[Progress]:
    """A line of progress on stderr: rewritten in place on a terminal, else one line per folder."""
    live, last = sys.stderr.isatty(), ""

    def show(done: int, total: int, name: str) -> None:
        nonlocal last
        folder = name.partition("/")[0]
        if live:
            print(f"\r\x1b[K{done} of {total} charts so far · {name}"[:100], end="", file=sys.stderr, flush=True)
        elif folder != last:
            print(f"{done} of {total} charts so far · {folder}", file=sys.stderr, flush=True)
        last = folder

    try:
        yield show
    finally:
        if live and last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def no_room(error: OSError) -> str:
    """An OSError as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: no report was written; free some space or choose another --output"
    return f"{error.filename or 'the report'} cannot be written: {error.strerror or error}"
