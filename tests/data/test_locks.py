"""A file system without flock, as Lustre is by default and NFS without its lock service: the kernel itself refuses."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from binade.data.run import store
from binade.data.run.store import file_system
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

FLOCK = {"x86_64": 73, "aarch64": 32}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000


def refuse_flock(number: int) -> None:
    """From now on flock raises this error in this process: a seccomp filter, which is there for good."""
    steps = [
        (LOAD, 0, 0, 0),  # the system call's number
        (JUMP_IF_EQUAL, 0, 1, FLOCK[platform.machine()]),
        (RETURN, 0, 0, FAIL | number),
        (RETURN, 0, 0, ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0, os.strerror(ctypes.get_errno())


SCRIPT = """
import errno, sys
from pathlib import Path
from tests.data.test_locks import refuse_flock
from tests.data.builder import assorted, make_run
from binade.cli import main
from binade.data.index.catalog import Catalog
from binade.data.run.store import locked

root = Path(sys.argv[1])
for name in ("EOPNOTSUPP", "ENOSYS", "ENOLCK"):
    refuse_flock(getattr(errno, name))  # the last filter counts
    try:
        with locked(root):
            print("held")
    except OSError as error:
        print(name, error.strerror)
make_run(root, assorted(1), assorted(2))
with Catalog.open(root) as catalog:
    print(catalog.totals().tensors)
for command in (["verify"], ["jobs", "add", "run"], ["import", *sys.argv[2:]]):
    print(main([*command, *["--tensor-save-dir"] * (len(command) > 1), str(root)]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() not in FLOCK, reason="the number of flock is not known here")
def test_without_locks_runs_are_recorded_and_the_rest_is_refused_in_one_line(tmp_path):
    root, logs = tmp_path / "root", tmp_path / "logs"
    root.mkdir()
    logs.mkdir()
    torch.save(torch.ones(3), logs / "x.pt")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, root, logs], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    said = f"its file system ({file_system(root)}) has no file locks: use a file system that has them"
    verified = "1 run, 22 files read: none damaged"
    lines = [f"{name} {said}" for name in ("EOPNOTSUPP", "ENOSYS", "ENOLCK")]
    lines += ["14", verified, "0", "1", "1"]
    assert done.stdout.splitlines() == lines, done.stderr
    queued, imported = done.stderr.splitlines()
    assert queued == f"binade: cannot write to {root}: {said}; choose another root for the runs"
    assert imported.startswith(f"binade: cannot write to {root}: {said}; choose a directory")


def test_file_systems_are_named_as_the_system_names_them(tmp_path):
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    for path in (tmp_path, Path("/proc/self"), Path("/dev")):
        place = next(str(each) for each in (path, *path.parents) if os.path.ismount(each))
        assert file_system(path) == mounted[place]


@pytest.mark.parametrize(("kind", "remedy"), [("lustre", "-o flock"), ("nfs", "NFS 4"), ("nfs4", "NFS 4")])
def test_what_to_do_on_a_cluster(kind, remedy, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "file_system", lambda path: kind)
    assert f"its file system ({kind}) has no file locks: mount it with {remedy}" in store._no_locks(tmp_path)
