"""Lets another Python process find this binade, whether it is installed or a checkout."""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path


def package_path() -> Path | None:
    """The directory that another Python needs on its path; None if binade is installed where Python finds it."""
    directory = Path(__file__).absolute().parents[3]
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    return None if str(directory) in (*installed, *site.getsitepackages()) else directory


def package_environment() -> dict[str, str]:
    """This process's environment, extended so that another Python finds the same binade from any working directory."""
    paths = [str(package_path() or ""), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
