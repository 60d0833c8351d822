"""What all sessions share is given up when nobody looks any more."""

from __future__ import annotations

import time

import numpy as np

from binade.app import state
from binade.data import cache
from binade.data.catalog import Catalog


def test_nothing_is_kept_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(state, "REST", 0.3)
    monkeypatch.setattr(cache, "IDLE", 0.1)
    with Catalog.open(tmp_path) as opened:
        watched = state.Watched(opened)
        watched.look()
        assert opened.cache
        state.shared(opened, "x", lambda done: np.zeros(1 << 20, np.uint8))
        assert opened.cache.nbytes >= 1 << 20
        until = time.monotonic() + 20
        while opened.cache.nbytes and time.monotonic() < until:
            time.sleep(0.02)
        assert not opened.cache.nbytes
