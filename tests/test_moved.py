"""Scripts that import modules by the places where they were before there were rooms."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from binade.moved import MOVED


@pytest.mark.parametrize("former", MOVED)
def test_the_former_name_is_the_same_module(former: str):
    module, now = import_module(former), import_module(MOVED[former])
    assert module is now and module.__name__ == MOVED[former]
    assert module.__spec__ is not None and module.__spec__.name == MOVED[former]


def test_a_script_of_a_user():
    code = (
        "from binade.data.events import read_events; from binade.app.view import View\n"
        "from binade.data import evidence\n"
        "from binade.data.runs import RunError; from binade.data.run.directory import RunError as now\n"
        "print(RunError is now, read_events.__module__, View.__module__, evidence.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "True",
        "binade.data.run.events",
        "binade.app.view.view",
        "binade.data.compare.evidence",
    ]
