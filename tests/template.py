"""`binade` as forks of one process that has imported it: to import Streamlit, torch and pandas takes longer than many a
command. As a program, it reads requests from a socket and answers with process ids."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


class Fork(subprocess.Popen[str]):
    """A process that is forked from the template, and is a child of this process as any that Popen starts."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others):  # fmt: skip
        ours, template = _template()
        files = [given if given != -1 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # its parent ends at once: this process takes the place
        try:
            socket.send_fds(ours, [b"\n"], files)
            ours.sendall(json.dumps([args, os.fspath(cwd), env]).encode() + b"\n")
            answer = ours.recv(100)
        finally:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert answer, f"the template has ended: {template.communicate()[1].decode()}"
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


@functools.cache
def _template() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        root = os.path.dirname(os.path.dirname(__file__))
        # Pipes, as of most forks: Python asks once whether its files can seek.
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        template = subprocess.Popen(command, cwd=root, pass_fds=[theirs.fileno()], **streams)
    atexit.register(lambda: (ours.close(), template.communicate()))  # it ends when it reads no more
    return ours, template


def _main() -> None:
    gc.disable()
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # as `binade serve`, before pyarrow is imported
    import binade.collector.training.loop  # noqa: F401
    from binade.app.frame.preloading import import_pages

    import_pages()
    gc.freeze()
    atexit.register(gc.unfreeze)  # as `binade.app.frame.state`: else nanobind reports what is left of DuckDB on stderr
    gc.enable()
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        _, files, *_ = socket.recv_fds(requests, 1, 3)
        if not files:
            os._exit(0)
        with requests.makefile() as lines:
            request = json.loads(lines.readline())
        read, write = os.pipe()
        if not (parent := os.fork()):
            if child := os.fork():
                os.write(write, str(child).encode())
                os._exit(0)
            requests.close()
            os.close(read)
            os.close(write)
            _become(files, *request)
        os.close(write)
        for file in files:
            os.close(file)
        os.waitpid(parent, 0)
        requests.sendall(os.read(read, 100))
        os.close(read)


def _become(files: Sequence[int], arguments: list[str], directory: str, env: dict[str, str]) -> None:
    import binade.__main__
    from binade.cli import main
    from binade.terminal import end_process

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    sys.modules["__main__"] = binade.__main__  # which processes of multiprocessing import
    sys.argv[:] = [binade.__main__.__file__, *arguments]
    end_process(main(arguments))


if __name__ == "__main__":
    _main()
