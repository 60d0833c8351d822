"""What the app's tests share: pages run in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from altair.utils.schemapi import disable_debug_mode
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from binade.app.frame import state
from binade.app.pages.registry import PAGES
from binade.app.view.params import texts_of
from tests.app import roots

# Every AppTest looks for components in all installed packages, which takes longer than many a page: once is enough.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)
disable_debug_mode()  # as `binade serve`; test_figures and test_charts check charts against Vega-Lite's schema


def open_page(page: str, query: Mapping[str, list[str]]) -> AppTest:
    """The page of the root TENSOR_SAVE_DIR as it is after its first run. It must not have failed."""
    at = AppTest.from_string(f"from binade.app.main import navigate\nnavigate({page!r})")
    at.default_timeout = 600  # on busy cores a page may take long
    for name, value in query.items():
        at.query_params[name] = value
    at.run()
    assert not at.exception, at.exception[0].message
    return at


def close_pages(roots: Iterable[str]) -> None:
    """Give up what pages of these roots have opened."""
    for root in roots:
        if Path(root).is_dir():
            state._open(root).opened.close()
        state._open.clear(root)
    state._sandbox.clear()


@pytest.fixture(scope="module")
def visited() -> Iterator[set[str]]:
    """The roots that pages of a module have opened. Those of several tests stay open and keep their answers, as in the
    app, where a new session does not open them again."""
    roots: set[str] = set()
    yield roots
    close_pages(roots)


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visited: set[str]) -> Iterator[Callable[..., AppTest]]:
    """visit(root, page="explore", **query): `open_page` of the root. A page may be named by one of its parts."""

    earlier = set(visited)

    def open_page_of(root: Path, page: str = "explore", **query: str | list[str]) -> AppTest:
        monkeypatch.setenv("TENSOR_SAVE_DIR", str(root))
        if str(root) in earlier:  # what this test has changed counts from the first page on
            earlier.remove(str(root))
            state._open(str(root)).opened.sync()
        visited.add(str(root))
        if page not in PAGES:
            query["view"], page = page, next(name for name, each in PAGES.items() if page in each.parts)
        return open_page(page, {name: texts_of(value) for name, value in query.items()})

    yield open_page_of
    own = {root for root in visited if Path(root).is_relative_to(tmp_path)}
    close_pages(own)
    visited -= own


@pytest.fixture(scope="module")
def odd_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of roots.odd_tensors(), one a layer."""
    root = tmp_path_factory.mktemp("odd")
    roots.record(root, list(roots.odd_tensors().values()))
    return root
