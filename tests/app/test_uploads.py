"""Files that are sent to a real app, with real requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from binade.app.frame.uploads import LARGEST, MOST
from tests.app.tab import Tab
from tests.browser.driver import serving
from tests.conftest import until

pytestmark = pytest.mark.slow
IMPORT = ("notebook", "part=import")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("uploads")) as address:
        yield address


@pytest.mark.thorough
def test_a_session_holds_one_file_while_its_page_asks_for_one(app: str):
    with Tab(app) as tab, Tab(app) as other:
        other.visit("runs")
        tab.visit("runs")
        assert tab.put(b"x" * 1000) == 403
        tab.visit(*IMPORT)
        assert [tab.put(b"x" * size, file) for size, file in ((1000, "a"), (2000, "b"), (3000, "b"))] == [204] * 3
        until(lambda: other.held() == 3000, "the last file alone")  # the app renews its metrics every few seconds
        assert other.put(b"x") == 403
        tab.visit("runs")
        assert tab.put(b"x") == 403
        until(lambda: other.held() == 0, "the file to go with its page")
        tab.visit(*IMPORT)
        assert tab.put(b"x" * 1000) == 204
        until(lambda: other.held() == 1000, "the file")
        tab.socket.close()
        until(lambda: other.held() == 0, "the file of a closed tab to go")


def test_a_page_that_asks_for_several_files_holds_them_together(app: str):
    with Tab(app) as tab:
        tab.visit("runs", "view=import")
        assert [tab.put(b"x" * 1000, file) for file in "abc"] == [204] * 3
        until(lambda: tab.held() == 3000, "all three")
        first = tab.begin(LARGEST // 2, "d")  # two at a time
        until(lambda: tab.begin(LARGEST // 2, "e").getresponse().status == 413, "both to be counted")
        assert tab.put(b"x" * 10, "f") == 204
        first.close()
        until(lambda: tab.put(b"x" * (LARGEST // 2), "g") == 204, "what was cut off to be forgotten")
        tab.visit("runs")
        assert tab.put(b"x") == 403
        until(lambda: tab.held() == 0, "the files to go with their page")


def test_size_number_and_total(app: str):
    tabs = [Tab(app) for _ in range(MOST // LARGEST + 1)]
    for tab in tabs:
        tab.visit(*IMPORT)
    assert tabs[0].begin(LARGEST + 1).getresponse().status == 413
    assert tabs[0].begin(None).getresponse().status == 411
    sending = [tab.begin(LARGEST) for tab in tabs[:-1]]

    def refused() -> bool:  # once all of the others have begun
        return tabs[-1].put(b"x" * 10) == 429

    until(refused, "the server to be full")
    assert tabs[0].put(b"x") == 429  # one at a time
    sending.pop().close()
    until(lambda: tabs[-1].put(b"x" * 10) == 204, "what was cut off to be forgotten")
    for tab in (*sending, *(tab.socket for tab in tabs)):
        tab.close()


def test_a_read_only_app_takes_no_file(tmp_path: Path):
    with serving(tmp_path, "--read-only") as app, Tab(app) as tab:
        tab.visit(*IMPORT)
        assert tab.put(b"x") == 403
