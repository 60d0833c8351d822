"""SIGINT and SIGTERM while the command is loaded, and while it serves."""

from __future__ import annotations

import os
import signal

import pytest

from tests.browser.driver import answers, free_port
from tests.conftest import PROJECT, ended, start_python, until

SIGNALS = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)


@SIGNALS
@pytest.mark.parametrize("module", ["click", "torch"])
def test_a_signal_while_modules_are_imported(signum, module, tmp_path):
    """click is imported before the command is known, torch by the command."""
    (tmp_path / f"{module}.py").write_text(f"import os; os.kill(os.getpid(), {signum:d})")
    done = ended(
        start_python("-m", "binade", "identify", "x", "q", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"})
    )
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr in ("", "binade: cancelled\n")


@pytest.mark.slow
def test_ctrl_c_ends_the_app(tmp_path):
    port = free_port()
    app = start_python("-m", "binade", "serve", str(tmp_path), "--port", str(port))
    until(lambda: answers(app.pid, f"http://127.0.0.1:{port}"), "the app", 600)
    app.send_signal(signal.SIGINT)
    done = ended(app)
    assert done.returncode == 130 and done.stderr in ("", "\n")  # the line of ^C ends
