"""Results that threads share: computed once, bounded in bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import torch

from binade.data.index.cache import AbandonedError, ResultCache, size_of


def array(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


class TestSingleFlight:
    def test_twenty_who_ask_at_once_compute_once(self):
        cache, computed, together = ResultCache(1 << 20), [], threading.Barrier(20)

        def compute(done):
            computed.append(1)
            threading.Event().wait(0.05)
            return array(10)

        def ask(_):
            together.wait()
            return cache.get(1, "x", compute)

        with ThreadPoolExecutor(20) as pool:
            found = list(pool.map(ask, range(20)))
        assert len(computed) == 1 and all(each is found[0] for each in found)

    def test_an_error_is_for_all_who_wait_and_is_not_kept(self):
        cache = ResultCache(1 << 20)

        def fail(done):
            raise ValueError("no such column")

        for _ in range(2):
            with pytest.raises(ValueError, match="no such column"):
                cache.get(1, "x", fail)
        assert cache.get(1, "x", lambda done: 5) == 5

    def test_what_nobody_waits_for_ends(self):
        cache, ended, stopped = ResultCache(1 << 20), threading.Event(), threading.Event()

        def compute(done):
            try:
                for step in range(10_000):
                    done(step, 10_000)
                    stopped.wait(0.01)
            except AbandonedError:
                ended.set()
                raise

        def step(count, of):
            raise KeyboardInterrupt

        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(KeyboardInterrupt):
                cache.get(1, "x", compute, pool, step)
            assert ended.wait(10)
            assert cache.get(1, "x", lambda done: "again", pool) == "again"

    def test_what_nobody_waits_for_is_not_begun(self):
        cache, free, begun = ResultCache(1 << 20), threading.Event(), []

        def leave(count, of):
            raise KeyboardInterrupt

        with ThreadPoolExecutor(1) as pool:
            pool.submit(free.wait, 10)  # another's, which takes long
            with pytest.raises(KeyboardInterrupt):
                cache.get(1, "x", lambda done: begun.append(1), pool, leave)
            free.set()
        assert not begun and cache.get(1, "x", lambda done: "again") == "again"

    def test_it_goes_on_while_another_waits(self):
        cache, asked, free = ResultCache(1 << 20), threading.Event(), threading.Event()

        def compute(done):
            asked.set()
            free.wait(10)
            done(1, 1)
            return 7

        def leave(count, of):
            raise KeyboardInterrupt

        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
            waits = other.submit(cache.get, 1, "x", compute, pool)
            asked.wait(10)
            with pytest.raises(KeyboardInterrupt):
                cache.get(1, "x", compute, pool, leave)
            free.set()
            assert waits.result(10) == 7


class TestBound:
    def test_the_least_recently_used_goes_first(self):
        cache, computed = ResultCache(10_000), []

        def get(name):
            return cache.get(1, name, lambda done: computed.append(name) or array(3000))

        for name in ("a", "b", "c", "a", "d", "a", "b"):
            get(name)
            assert cache.nbytes <= 10_000
        assert computed == ["a", "b", "c", "d", "b"]

    def test_what_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out(self):
        cache = ResultCache(10_000)
        cache.get(1, "small", lambda done: array(1000))
        assert len(cache.get(1, "large", lambda done: array(20_000))) == 20_000
        assert 1000 <= cache.nbytes < 2000

    def test_other_versions_expire(self):
        cache = ResultCache(10_000)
        for version in (1, 2, None):
            cache.get(version, "x", lambda done: array(1000))
        cache.expire(2)
        found = [cache.get(version, "x", lambda done: "new") for version in (1, 2, None)]
        assert [isinstance(each, str) for each in found] == [True, False, False]


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (array(5000), 5000),
        (torch.zeros(1000, dtype=torch.float64), 8000),
        ({"a": [array(1000), array(500)]}, 1500),
        (pd.DataFrame({"x": np.arange(1000.0)}), 8000),
        (pd.DataFrame({"x": [bytes([n]) * 1000 for n in range(9)]}), 9000),
        (pd.Series(["x" * 5000, "y"]), 5000),
    ],
    ids=["array", "tensor", "nested", "frame", "objects", "texts"],
)
def test_sizes_count_values(value, nbytes):
    assert nbytes <= size_of(value) < nbytes + 1500
