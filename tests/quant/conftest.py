"""Kernels for the CPU are built once a session, in a directory of the session's own, for all its workers. Small tensors
need one thread."""

from __future__ import annotations

import os

import pytest
import torch

from binade.quant.backends import native


@pytest.fixture(scope="session", autouse=True)
def builds(tmp_path_factory):
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "builds"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BINADE_CACHE_DIR", str(place))
        native.directory.cache_clear()
        yield
    native.directory.cache_clear()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that spin for work cost more than these small tensors do, on a machine that does anything else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
