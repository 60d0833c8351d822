"""What a websocket sends that no page of the app would: one line of the log, and never a traceback."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState, WidgetStates
from streamlit.runtime.state.common import WidgetMetadata

from binade.app.guard import PROTOCOL_ERROR, Guard
from binade.app.reruns import _readable
from binade.app.sharing import Sharing


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """What Streamlit does with a message: it reads bytes until the browser has gone."""
    socket = WebSocket(scope, receive, send)
    await socket.accept()
    try:
        while True:
            await socket.send_bytes(await socket.receive_bytes())
    except WebSocketDisconnect:
        return


@pytest.mark.parametrize(
    "frame", ["text", "", b"\xff\xff\xff", b"\x0a\xff\xff", bytes(50), b"GET / HTTP/1.1"], ids=repr
)
def test_a_frame_that_is_no_message_closes_the_socket(frame: str | bytes, caplog: pytest.LogCaptureFixture):
    client = TestClient(Guard(echo, Sharing(("testserver",))))
    with client.websocket_connect("/", headers={"Origin": "http://testserver"}) as socket:
        message = BackMsg()
        message.rerun_script.page_name = "explore"
        socket.send_bytes(message.SerializeToString())
        assert BackMsg.FromString(socket.receive_bytes()) == message
        with caplog.at_level(logging.WARNING):
            (socket.send_text if isinstance(frame, str) else socket.send_bytes)(frame)  # type: ignore[arg-type]
            with pytest.raises(WebSocketDisconnect) as closed:
                socket.receive_bytes()
    assert closed.value.code == PROTOCOL_ERROR
    (line,) = caplog.records
    assert "no message of Streamlit" in line.getMessage() or "it sent text" in line.getMessage()
    assert "\n" not in line.getMessage() and not line.exc_info


def test_a_value_that_a_widget_cannot_have_is_left_out(caplog: pytest.LogCaptureFixture):
    def chosen(value: Any) -> str:
        return ("a", "b")[value or 0]

    known = {"select": WidgetMetadata("select", chosen, lambda value: value, "int_value")}
    good = [WidgetState(id="select", int_value=1), WidgetState(id="select"), WidgetState(id="gone", bool_value=True)]
    bad = [WidgetState(id="select", int_value=7), WidgetState(id="select", string_value="a")]
    sent = WidgetStates(widgets=good)
    assert _readable(sent, known) is sent and not caplog.records
    assert list(_readable(WidgetStates(widgets=[*bad, *good]), known).widgets) == good
    assert [record.getMessage() for record in caplog.records] == [
        "The browser sent 2 values that their widgets cannot have"
    ]
