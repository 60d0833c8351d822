"""Apps as forks of one process that has imported them: to import Streamlit, torch and pandas takes longer than to serve
many a page. As a program, it reads one request per line and answers with the process id of the app."""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from tests.conftest import start_python


def serve(arguments: Sequence[str], env: Mapping[str, str], output: str) -> psutil.Process:
    """binade with these arguments, and an environment in addition to this one; what it prints goes to a file."""
    template = _template()
    assert template.stdin and template.stdout
    print(json.dumps([arguments, {**os.environ, **env}, output]), file=template.stdin, flush=True)
    return psutil.Process(int(template.stdout.readline()))


@functools.cache
def _template() -> subprocess.Popen[str]:
    started = start_python("-m", "tests.browser.template", stdin=subprocess.PIPE, stderr=None)
    atexit.register(started.communicate)  # it ends when it reads no more
    return started


def _main() -> None:
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # as `binade serve`, before pyarrow is imported
    from binade.app.preloading import import_pages

    import_pages()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the apps
    for line in sys.stdin:
        if child := os.fork():
            print(child, flush=True)
        else:
            _become(*json.loads(line))


def _become(arguments: list[str], env: dict[str, str], output: str) -> None:
    from binade.cli import main

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate((os.devnull, output, output)):
        os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
    sys.argv[1:] = arguments
    sys.exit(main(arguments))


if __name__ == "__main__":
    _main()
