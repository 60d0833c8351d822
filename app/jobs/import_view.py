"""Import files that other tools have written: an uploaded one, or a path that the server can read.

`binade import` runs in a process of its own, so that a hostile file cannot harm the app. What it recognizes is shown
first. An upload is kept in the root, since the index of tensors points to their files.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread

import streamlit as st
from streamlit.runtime.uploaded_file_manager import UploadedFile

from binade.app import uploads
from binade.app.formatting import plain
from binade.app.questions.shared.runs import every_run, run_titles
from binade.data.access import check_writable
from binade.data.catalog import Catalog
from binade.data.store import SUFFIXES, remove_directory, write_atomic

FOLDER = ".uploads"  # in the root
UPLOAD, PATH = "Upload a file", "A path on the server"
LONGEST_NAME = 100
BEAT = 1.0  # seconds between looks at whether the page was left
IMPORTING = "Importing. If you leave this page, the import ends and keeps what it has read."
RECOGNIZED = "import_recognized"  # in the session's state: (what was asked, exit status, lines)
HELP = "What the training of a loss log was quantized to; bf16 for a baseline. Leave it empty for tensors"


def show(opened: Catalog) -> None:
    with st.expander("Import files of another tool", icon=":material/upload_file:"):
        st.caption("Loss logs, tensor dumps and checkpoints, recognized by their content.")
        way = st.radio("From", (UPLOAD, PATH), horizontal=True, key="import_way", label_visibility="collapsed")
        given = uploads.uploader("File", None, "import_upload") if way == UPLOAD else None
        path = st.text_input("File or directory", key="import_path").strip() if way == PATH else ""
        a, b = st.columns(2)
        recipe = a.text_input("Recipe of the losses", key="import_recipe", help=HELP).strip()
        titles = run_titles(every_run(opened))
        like = b.selectbox(
            "Same model, data and seed as", [*titles][::-1], index=None, key="import_like",
            format_func=lambda run_id: titles.get(run_id, run_id), placeholder="unknown",
        )  # fmt: skip
        options = [f"--recipe={recipe}"] * bool(recipe) + [f"--like={like}"] * bool(like)
        if given is not None or path:
            _offer(opened.root, given, path, options)


def _offer(root: Path, given: UploadedFile | None, path: str, options: list[str]) -> None:
    """Show what is recognized, and a button that imports it."""
    digest = hashlib.sha256(given.getvalue()).hexdigest() if given else ""
    asked = digest, given.name if given else path, *options
    try:
        check_writable("importing")
        if st.session_state.get(RECOGNIZED, [None])[0] != asked:
            note = st.empty()
            with st.spinner("Recognizing"), TemporaryDirectory() as folder:
                source = _saved(Path(folder), given) if given else Path(path)
                status, lines = _run(root, source, [*options, "--dry-run"], lambda line: note.caption(plain(line)))
                lines = [line.replace(folder, "the upload").replace("the upload/", "") for line in lines]
            note.empty()
            st.session_state[RECOGNIZED] = asked, status, lines
        _, status, lines = st.session_state[RECOGNIZED]
        if status == 2 or not lines:
            reason = lines[-1].removeprefix("binade: ") if lines else "nothing was recognized"
            st.error(plain(f"{reason}."), icon=":material/block:")
        else:
            st.code("\n".join(lines), language=None)
            if st.button("Import", type="primary", icon=":material/download:", key="import_files"):
                _import(root, given, digest, path, options)
    except (ValueError, OSError) as error:  # read-only access, or a path that no file can have
        st.error(plain(f"{error}."), icon=":material/block:")


def _import(root: Path, given: UploadedFile | None, digest: str, path: str, options: list[str]) -> None:
    folder = root / FOLDER / digest[:16]
    source = _saved(folder, given) if given else Path(path)
    with st.status(IMPORTING) as state:
        status, lines = _run(root, source, options, lambda line: state.update(label=plain(line) or IMPORTING))
        if status == 2 and given:
            remove_directory(folder)
        state.update(label="Imported" if status == 0 else plain(lines[-1] if lines else "The import failed."),
                     state="complete" if status == 0 else "error")  # fmt: skip
        st.code("\n".join(lines), language=None)
    if given:
        uploads.drop()


def _saved(folder: Path, given: UploadedFile) -> Path:
    """What to import after the upload is saved in the folder, under a harmless name: the file, or the folder if it has
    tensors."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", re.split(r"[/\\]", given.name)[-1])[-LONGEST_NAME:].lstrip(".") or "file"
    folder.mkdir(parents=True, exist_ok=True)
    name = next((file.name for file in folder.iterdir()), name)  # the same bytes, uploaded under another name
    write_atomic(folder / name, given.getvalue())
    return folder if (folder / name).suffix in SUFFIXES else folder / name


def _read(process: subprocess.Popen[str], printed: SimpleQueue[str | None]) -> None:
    """Put each line that a process prints into the queue, and None at its end."""
    assert process.stdout
    for line in process.stdout:
        printed.put(line.rstrip())
    printed.put(None)


def _run(root: Path, source: Path, options: list[str], say: Callable[[str], object]) -> tuple[int, list[str]]:
    """(exit status, lines printed) of `binade import`. If the page is left meanwhile, the command is cancelled."""
    what = [*options, "--tensor-save-dir", str(root), "--", str(source)]
    command, lines, ended = [sys.executable, "-P", "-m", "binade", "import", *what], list[str](), False
    printed: SimpleQueue[str | None] = SimpleQueue()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        Thread(target=_read, args=(process, printed), daemon=True).start()
        try:
            while not ended:
                with suppress(Empty):
                    if (line := printed.get(timeout=BEAT)) is None:
                        ended = True
                    else:
                        lines.append(line)
                say(lines[-1] if lines else "")  # where Streamlit ends a script whose page was left
        finally:
            if not ended:
                process.terminate()
    return process.returncode, lines
