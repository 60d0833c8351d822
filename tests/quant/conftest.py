"""Kernels for the CPU are built once a session, in a directory of the session's own."""

from __future__ import annotations

import pytest

from quant import cpu


@pytest.fixture(scope="session", autouse=True)
def builds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BINADE_CACHE_DIR", str(tmp_path_factory.mktemp("builds")))
        cpu._directory.cache_clear()
        yield
    cpu._directory.cache_clear()
