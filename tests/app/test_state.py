"""What all sessions share is given up when nobody looks any more."""

from __future__ import annotations

import numpy as np

from binade.app import state
from binade.data import cache
from binade.data.catalog import Catalog
from tests.conftest import until


def test_nothing_is_kept_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(state, "REST", 3.0)
    with Catalog.open(tmp_path) as opened:
        watched = state.Watched(opened)
        state.shared(opened, "x", lambda done: np.zeros(1 << 20, np.uint8))
        assert opened.cache
        assert opened.cache.nbytes >= 1 << 20
        watched.look()
        assert watched._sync
        watched._sync.result()  # this drops what was idle too
        assert opened.cache.nbytes >= 1 << 20
        monkeypatch.setattr(cache, "IDLE", 0.0)
        until(lambda: not opened.cache.nbytes, "it to be dropped")
