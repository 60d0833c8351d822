"""What all sessions share is given up when nobody looks any more."""

from __future__ import annotations

import numpy as np

from binade.app.frame import state
from binade.data.index import cache
from binade.data.index import database as index
from binade.data.index.catalog import Catalog
from tests.conftest import until
from tests.data.builder import assorted, make_run


def test_nothing_is_kept_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(state, "REST", 3.0)
    with Catalog.open(tmp_path) as opened:
        watched = state.Watched(opened)
        assert opened.cache
        opened.cache.get(None, "x", lambda done: np.zeros(1 << 20, np.uint8))
        assert opened.cache.nbytes >= 1 << 20
        watched.look()
        assert watched._sync
        watched._sync.result()  # this drops what was idle too
        assert opened.cache.nbytes >= 1 << 20
        monkeypatch.setattr(cache, "IDLE", 0.0)
        until(lambda: not opened.cache.nbytes, "it to be dropped")


def test_an_index_that_gives_memory_back_answers_as_before(tmp_path):
    make_run(tmp_path, assorted(1))

    with Catalog.open(tmp_path) as opened:
        before = opened.tensors()
        with opened._index.cursor() as cursor:
            limit = cursor.execute("SELECT current_setting('memory_limit')").fetchone()
            running = cursor.execute("SELECT sum(range) FROM range(1000)")
            opened.release_memory()
            assert running.fetchone() == (499500,)
        opened.release_memory()
        assert opened.tensors().equals(before)
        with opened._index.cursor() as cursor:
            assert cursor.execute("SELECT current_setting('memory_limit')").fetchone() == limit
    opened.release_memory()  # after it was closed


def test_memory_that_another_catalog_may_need_is_not_given_back(tmp_path, monkeypatch):
    """Catalogs of one root in one process share a database and its limit. Giving back sets the limit."""
    make_run(tmp_path, assorted(1))

    def limit(of: Catalog) -> str:
        with of._index.cursor() as cursor:
            return cursor.execute("SELECT current_setting('memory_limit')").fetchone()[0]

    with Catalog.open(tmp_path) as opened:
        with Catalog.open(tmp_path) as other:
            before = limit(other)
            monkeypatch.setattr(index, "INDEX_MEMORY", "100MB")
            opened.release_memory()
            assert limit(other) == limit(opened) == before != "95.3 MiB"
        opened.release_memory()
        assert limit(opened) == "95.3 MiB"


def test_what_was_refused_is_known_while_the_root_is_read_again(tmp_path, monkeypatch):
    (make_run(tmp_path, assorted(1)).directory / "run.json").write_text("{")
    with Catalog.open(tmp_path) as opened:
        intake, before, seen = opened._index.intake, opened.refused, []
        look = intake._look
        monkeypatch.setattr(intake, "_look", lambda known: seen.append([*opened.refused]) or look(known))
        opened.sync()
        assert seen and all(each == before != [] for each in [*seen, opened.refused])
