"""What a click asks of the server, and what the server sends for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, WebSocket
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from binade.app.pages.registry import PAGES
from tests.browser.driver import settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]


def heard(page: Page) -> list[ForwardMsg]:
    """What the server sends from now on. The page is loaded again, so that its connection is heard."""
    messages: list[ForwardMsg] = []

    def receive(frame: bytes | str) -> None:
        if isinstance(frame, bytes):
            messages.append(ForwardMsg.FromString(frame))

    def listen(socket: WebSocket) -> None:
        socket.on("framereceived", receive)

    page.on("websocket", listen)
    page.reload()
    settle(page)
    return messages


def elements(messages: list[ForwardMsg]) -> list[str]:
    return [each.delta.new_element.WhichOneof("type") for each in messages if each.delta.HasField("new_element")]


@pytest.mark.parametrize("path", ["/map", "/explore", "/tensor", "/runs"])
def test_a_chip_opens_without_drawing_anything_but_the_bar(visit: Visit, path: str):
    page = visit(path)
    messages = heard(page)
    assert "bidi_component" in elements(messages)
    messages.clear()
    page.locator(".st-key-filter_more button:visible").click()
    page.locator("[class*=st-key-field_] button:visible").first.click()
    page.locator(".st-key-chip_values :is([data-testid=stButtonGroup], [data-testid=stMultiSelect])").first.wait_for()
    settle(page)
    assert all(each.delta.fragment_id for each in messages if each.HasField("delta"))  # the page was not run
    bar = next(each.delta.fragment_id for each in messages if each.delta.new_element.HasField("button"))
    own = [each for each in messages if each.delta.fragment_id == bar]  # Explore may ask for curves meanwhile
    assert set(elements(own)) <= {"button", "selectbox", "markdown", "button_group", "multiselect"}


@pytest.mark.parametrize("name", list(PAGES))
def test_the_header_comes_before_the_page(visit: Visit, name: str):
    """As the server sends it, so also while an answer is computed."""
    messages = heard(visit(f"/{name}"))
    sent = elements(messages)
    assert sent.count("page_link") >= len(PAGES)
    links = [at for at, element in enumerate(sent) if element == "page_link"][: len(PAGES)]
    palette = sent.index("bidi_component")
    assert links[-1] < palette < sent.index("heading")
