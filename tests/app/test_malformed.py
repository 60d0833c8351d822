"""What a websocket sends that no page of the app would: one line of the log, and never a traceback."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState, WidgetStates
from streamlit.runtime.state.common import WidgetMetadata
from streamlit.runtime.state.session_state import SessionState
from streamlit.testing.v1 import AppTest

from binade.app.frame.guard import PROTOCOL_ERROR, Guard
from binade.app.frame.reruns import _leave_out_unreadable, _readable
from binade.app.frame.sharing import Sharing


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


@pytest.mark.parametrize(
    ("sent", "value"),
    [({"int_value": 5}, 5), ({"double_value": 5.0}, 5), ({"string_value": "5"}, 8), ({"double_value": math.nan}, 8)],
    ids=str,
)
def test_a_field_of_whole_numbers_takes_both_kinds_of_numbers(
    sent: dict[str, Any], value: int, monkeypatch: pytest.MonkeyPatch
):
    """Streamlit's own widget: it registers floats, and its browser sends integers."""

    def page():
        import streamlit as st

        st.text(f"{st.number_input('Sequences', 2, 10_000, 8)!r}")

    monkeypatch.setattr(SessionState, "on_script_will_rerun", SessionState.on_script_will_rerun)
    _leave_out_unreadable()
    shown = AppTest.from_function(page).run()
    (field,) = shown.number_input
    shown._run(WidgetStates(widgets=[WidgetState(id=field.id, **sent)]))
    assert not shown.exception and shown.text[0].value == repr(value)
