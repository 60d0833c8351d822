"""Kernels for the CPU are built once a session, in a directory of the session's own, for all its workers, with flags
that compile them in a third of the time. Small tensors need one thread."""

from __future__ import annotations

import os

import pytest
import torch
from filelock import FileLock

from binade.quant.backends import native

# Vectorized too. Strict IEEE arithmetic has the same bits at every level; test_cpu.test_as_users_build_it takes -O3.
FAST_TO_BUILD = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic")


@pytest.fixture(scope="module", autouse=True)
def builds(tmp_path_factory):
    """For these tests alone: another test, or a process that it starts, must not find other builds than a user's."""
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "builds"
    build = native._build

    def build_once(unit: native.Unit) -> None:
        """Whichever worker comes first builds; the others wait."""
        with FileLock(f"{unit.path}.lock"):
            if not unit.path.exists():
                build(unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BINADE_CACHE_DIR", str(place))
        patch.setattr(native, "FLAGS", (*(flag for flag in native.FLAGS if flag != "-O3"), *FAST_TO_BUILD))
        patch.setattr(native, "_build", build_once)
        patch.setattr(native, "_loaded", {})
        patch.setattr(native, "_worked", {})
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Where builds are, and their names: both depend on what `builds` sets."""
    native.directory.cache_clear()
    native._stamp.cache_clear()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that spin for work cost more than these small tensors do, on a machine that does anything else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
