"""Import files that other tools have written: uploaded ones, or a path that the server can read.

`binade import` runs in a process of its own, so that a hostile file cannot harm the app. What it recognizes is shown
first. Uploads are kept in the root, since the index of tensors points to their files: those of one upload in a
directory, which is named by their names and contents, so that the same upload is the same import.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile, TemporaryDirectory

import streamlit as st
from streamlit.runtime.uploaded_file_manager import UploadedFile

from binade.app.draw.formatting import plain
from binade.app.frame import address, uploads
from binade.app.questions.shared.runs import every_run, run_titles
from binade.app.view.view import Reading, View
from binade.collector.imports.readers.events import NAME as EVENT_FILE
from binade.collector.imports.registry import statistics_of
from binade.data.index.catalog import Catalog
from binade.data.run.access import check_writable
from binade.data.run.store import SUFFIXES, remove_directory, staged_directory
from binade.data.words.text import counted

FOLDER = ".uploads"  # in the root
FILES, DIRECTORY, PATH = "Upload files", "Upload a directory", "A path on the server"
LONGEST_NAME = 100
DEEPEST = 12  # names of a path
MOST_LINKED = 12  # runs that a link names
BEAT = 1.0  # seconds between looks at whether the page was left
IMPORTING = "Importing. If you leave this page, the import ends, and no more is imported."
RECOGNIZED = "import_recognized"  # in the session's state: (what was asked, exit status, lines)
HELP = "What the training of a loss log was quantized to; bf16 for a baseline. Leave it empty for tensors"


@dataclass(frozen=True)
class Upload:
    """Uploaded files. contents: by the place where each is saved, relative to the directory of the upload"""

    contents: Mapping[str, bytes]
    digest: str

    def save(self, folder: Path) -> Path:
        """What to import after the files are saved in this new directory: the directory, or the file if it is the only
        one and has no tensors. If it exists, it has them."""
        if not folder.is_dir():
            with staged_directory(folder) as part:
                for place, content in self.contents.items():
                    (part / place).parent.mkdir(parents=True, exist_ok=True)
                    (part / place).write_bytes(content)
        files = [path for path in folder.rglob("*") if path.is_file()]
        is_log = files[0].suffix not in SUFFIXES and statistics_of(files[0]) is None
        return files[0] if len(files) == 1 and is_log else folder


def show(opened: Catalog, view: View, reading: Reading) -> None:
    st.caption("Loss logs, tensor dumps and checkpoints of other tools, recognized by their content.")
    ways = (FILES, DIRECTORY, PATH)
    way = st.radio("From", ways, horizontal=True, key="import_way", label_visibility="collapsed")
    given: list[UploadedFile] = []
    path = ""
    if way == PATH:
        path = st.text_input("File or directory", key="import_path").strip()
    else:
        key = "import_directory" if way == DIRECTORY else "import_upload"
        given = uploads.uploader_of_several("Directory" if way == DIRECTORY else "Files", key, way == DIRECTORY)
    a, b = st.columns(2)
    recipe = a.text_input("Recipe of the losses", key="import_recipe", help=HELP).strip()
    titles = run_titles(every_run(opened))
    like = b.selectbox(
        "Same model, data and seed as", [*titles][::-1], index=None, key="import_like",
        format_func=lambda run_id: titles.get(run_id, run_id), placeholder="unknown",
    )  # fmt: skip
    options = [f"--recipe={recipe}"] * bool(recipe) + [f"--like={like}"] * bool(like)
    if given or path:
        _offer(opened, view, given, path, options)


def _offer(opened: Catalog, view: View, given: Sequence[UploadedFile], path: str, options: list[str]) -> None:
    """Show what is recognized, and a button that imports it."""
    root = opened.root
    try:
        check_writable("importing")
        upload = uploaded([(file.name, file.getvalue()) for file in given]) if given else None
        asked = upload.digest if upload else path, *options
        if st.session_state.get(RECOGNIZED, [None])[0] != asked:
            note = st.empty()
            with st.spinner("Recognizing"), TemporaryDirectory() as folder:
                source = upload.save(Path(folder, "upload")) if upload else Path(path)
                status, lines = _run(root, source, [*options, "--dry-run"], lambda line: note.caption(plain(line)))
                lines = [line.replace(f"{folder}/upload", "the upload").replace("the upload/", "") for line in lines]
            note.empty()
            st.session_state[RECOGNIZED] = asked, status, lines
        _, status, lines = st.session_state[RECOGNIZED]
        if status == 2 or not lines:
            reason = lines[-1].removeprefix("binade: ") if lines else "nothing was recognized"
            st.error(plain(f"{reason}."), icon=":material/block:")
            if lines[:-1]:
                st.code("\n".join(lines[:-1]), language=None)
        else:
            st.code("\n".join(lines), language=None)
            if st.button("Import", type="primary", icon=":material/download:", key="import_files"):
                before = set(opened.runs()["run_id"])
                _import(root, upload, path, options)
                opened.sync()
                _tell(opened, view, before)
    except (ValueError, OSError) as error:  # read-only access, or a path that no file can have
        st.error(plain(f"{error}."), icon=":material/block:")


def _import(root: Path, upload: Upload | None, path: str, options: list[str]) -> None:
    folder = root / FOLDER / (upload.digest[:16] if upload else "")
    is_new = upload is not None and not folder.exists()
    source = upload.save(folder) if upload else Path(path)
    with st.status(IMPORTING) as state:
        status, lines = _run(root, source, options, lambda line: state.update(label=plain(line) or IMPORTING))
        if status == 2 and is_new:
            remove_directory(folder)
        state.update(label="Imported" if status == 0 else plain(lines[-1] if lines else "The import failed."),
                     state="complete" if status == 0 else "error")  # fmt: skip
        st.code("\n".join(lines), language=None)
    if upload:
        uploads.drop()


def _tell(opened: Catalog, view: View, before: Collection[str]) -> None:
    """What was imported, with a link to it."""
    runs = opened.runs()
    made = runs[~runs["run_id"].isin(before)]
    if made.empty:
        return
    tensors = int(made["tensors"].sum())
    what = [counted(tensors, "tensor")] if tensors else []
    what += ["losses"] if made["first_step"].notna().any() else []
    st.success(f"{counted(len(made), 'run')} with {' and '.join(what) or 'nothing'} imported.", icon=":material/check:")
    ids = made["run_id"].tolist()
    if tensors:
        recorded = made.loc[made["tensors"] > 0, "run_id"].iloc[0]
        address.link(view.at("map", run_id=recorded), "Open it in the Map", ":material/grid_on:")
    address.link(view.at("runs", "", chosen=ids[:MOST_LINKED]), "See the runs", ":material/science:")


def uploaded(files: Sequence[tuple[str, bytes]]) -> Upload:
    """The upload of these files: (name or relative path, content). A file alone is the same under any name. Raises
    ValueError for two files of one directory with the same path."""
    contents: dict[str, bytes] = {}
    folders: set[str] = set()
    events = sum(EVENT_FILE in name for name, _ in files) > 1
    for name, content in files:
        path = harmless(name)
        if events and EVENT_FILE in path and "/" not in path:
            path = f"{path}/{path}"  # all event files of a directory are one training
        place, number = path, 1
        while place in contents or place in folders or not contents.keys().isdisjoint(_above(place)):
            if "/" in harmless(name):
                raise ValueError(f"{path} is uploaded twice: upload directories of the same name one after the other")
            number += 1
            place = f"{number}/{path}"
        contents[place] = content
        folders |= {*_above(place)}
    known = [(place if len(files) > 1 else "", sha256(content).hexdigest()) for place, content in contents.items()]
    return Upload(contents, sha256(json.dumps(sorted(known)).encode()).hexdigest())


def harmless(name: str) -> str:
    """A relative path without odd characters for an uploaded file, of the last names of its own path."""
    names = [re.sub(r"[^A-Za-z0-9._-]", "_", part)[-LONGEST_NAME:].lstrip(".") for part in re.split(r"[/\\]", name)]
    return "/".join([part for part in names if part][-DEEPEST:]) or "file"


def _above(place: str) -> list[str]:
    """The folders of a relative path."""
    return [str(folder) for folder in PurePosixPath(place).parents][:-1]


def _run(root: Path, source: Path, options: list[str], say: Callable[[str], object]) -> tuple[int, list[str]]:
    """(exit status, lines printed) of `binade import`. If the page is left meanwhile, the command is cancelled."""
    what = [*options, "--tensor-save-dir", str(root), "--", str(source)]
    command = [sys.executable, "-P", "-m", "binade", "import", *what]
    with (
        NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace") as printed,
        open(printed.name, "wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        text = ""
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(BEAT)
                text += printed.read()
                say((text.splitlines() or [""])[-1])  # where Streamlit ends a script whose page was left
        finally:
            process.terminate()
        text += printed.read()  # what it has printed since, before it ended
    return process.returncode, text.splitlines()
