"""A folder for PATH with the programs of a machine that has what README asks for and nothing else.

python3 -m tests.bare_path FOLDER [PROGRAM ...] fills a new folder with links to Python, git and make, to the programs
of the packages that every Debian has (priority "required"), and to the further programs named. apt-get is one of the
first: `make test` installs Chromium with it. This file needs the standard library alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
README = ("python3", "git", "make")
CHROMIUM = Path("/usr/bin/chromium")  # where Debian's package puts it; the link leads nowhere before that


def debian() -> set[str]:
    """The names of the programs of every Debian, alternatives such as awk included."""
    shown = subprocess.check_output(["dpkg-query", "-W", "-f", "${Package} ${Priority}\n"], text=True)
    packages = [line.split()[0] for line in shown.splitlines() if line.endswith(" required")]
    listed = subprocess.check_output(["dpkg-query", "-L", *packages, "apt"], text=True).splitlines()
    owned = {os.path.realpath(path) for path in listed if path.startswith(tuple(f"{each}/" for each in FOLDERS))}
    return {path.name for folder in map(Path, FOLDERS) for path in folder.iterdir() if os.path.realpath(path) in owned}


def fill(folder: Path, further: Iterable[str] = ()) -> None:
    """Raises FileExistsError, and FileNotFoundError for a program that is not installed."""
    folder.mkdir(parents=True)
    for name in {*debian(), *README[1:]}:
        (folder / name).symlink_to(program(name))
    (folder / CHROMIUM.name).symlink_to(shutil.which(CHROMIUM.name) or CHROMIUM)
    # These look for their libraries, or for other programs, beside themselves or on PATH.
    for name in (README[0], *further):
        path = sys.executable if name == README[0] else program(name)
        line = f"PATH={shlex.quote(os.environ['PATH'])} " if name != README[0] else ""
        (folder / name).write_text(f'#!/bin/sh\n{line}exec {shlex.quote(path)} "$@"\n')
        (folder / name).chmod(0o755)


def program(name: str) -> str:
    if path := shutil.which(name) or next(iter(filter(os.path.exists, (f"{each}/{name}" for each in FOLDERS))), None):
        return path
    raise FileNotFoundError(f"{name} is not installed")


if __name__ == "__main__":
    fill(Path(sys.argv[1]), sys.argv[2:])
