"""A page is completed whatever reruns itself meanwhile, and closed sessions go: against Streamlit's own runtime."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime import Runtime, RuntimeConfig
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage
from streamlit.runtime.memory_session_storage import MemorySessionStorage
from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
from streamlit.runtime.scriptrunner.script_runner import ScriptRunner
from streamlit.runtime.state.session_state import SessionState

from binade.app.frame import reruns

pytestmark = pytest.mark.slow

PAGE = """
import streamlit as st
from tests.app.test_reruns import Kept
st.session_state["kept"] = Kept()
st.write("first")
if "drawn" in st.query_params:
    st.button("Drawn " + st.query_params["drawn"], on_click=st.session_state["kept"].press)
st.fragment(run_every=2)(lambda: None)()
st.write("last")
"""

PAGES = """
import streamlit as st
from tests.app.test_reruns import TURNING

def first():
    st.fragment(run_every=2)(lambda: None)()
    st.fragment(turn)()

def turn():
    if st.button("turn"):
        st.switch_page(pages[1])

def second():
    TURNING.wait(30)
    st.write("second")

pages = [st.Page(first, default=True), st.Page(second)]
st.navigation(pages).run()
"""
TURNING = threading.Event()  # set: the second page may go on


class Kept:
    """What a page keeps in its session, or for its button."""

    pressed = False

    def press(self) -> None:
        self.pressed = True


class Tab:
    client_context = None

    def __init__(self) -> None:
        self.seen: list[ForwardMsg] = []

    def write_forward_msg(self, message: ForwardMsg) -> None:
        self.seen.append(message)

    async def until(self, status: ForwardMsg.ScriptFinishedStatus.ValueType) -> None:
        while not any(each.script_finished == status for each in self.ends()):
            await asyncio.sleep(0.01)

    def ends(self) -> list[ForwardMsg]:
        return [each for each in self.seen if each.WhichOneof("type") == "script_finished"]


def rerun(fragment: str = "", query: str = "", pressed: str = "") -> BackMsg:
    message = BackMsg()
    message.rerun_script.query_string = query
    if pressed:
        message.rerun_script.widget_states.widgets.add(id=pressed, trigger_value=True)
    message.rerun_script.fragment_id, message.rerun_script.is_auto_rerun = fragment, bool(fragment)
    return message


def wait_for(condition: Callable[[], bool]) -> None:
    """Without giving the event loop a turn, as one that is busy."""
    until = time.monotonic() + 30
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def script_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ScriptRunner.scriptThread"]


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(AppSession, "_create_scriptrunner", AppSession._create_scriptrunner)  # put back afterwards
    monkeypatch.setattr(ScriptRunner, "_run_script", ScriptRunner._run_script)
    monkeypatch.setattr(ForwardMsgQueue, "clear", ForwardMsgQueue.clear)
    monkeypatch.setattr(MemorySessionStorage, "save", MemorySessionStorage.save)
    monkeypatch.setattr(SessionState, "_remove_stale_widgets", SessionState._remove_stale_widgets)
    monkeypatch.setattr(Runtime, "_instance", None)
    (tmp_path / "page.py").write_text(PAGE)
    files = MemoryMediaFileStorage("/media"), MemoryUploadedFileManager("/upload")
    removed = asyncio.Event()
    reruns.install(removed.set)
    storage = MemorySessionStorage(ttl_seconds=0)
    made = Runtime(RuntimeConfig(str(tmp_path / "page.py"), *files, session_storage=storage))
    made.removed = removed
    return made


def test_an_automatic_rerun_does_not_take_the_end_of_a_page(runtime):
    async def visit() -> list[str]:
        await runtime.start()
        tab = Tab()
        session = runtime.connect_session(tab, user_info={})
        runtime.handle_backmsg(session, rerun())
        await tab.until(ForwardMsg.FINISHED_SUCCESSFULLY)
        fragment = next(each.auto_rerun.fragment_id for each in tab.seen if each.HasField("auto_rerun"))
        wait_for(lambda: not script_threads())
        await asyncio.sleep(0.1)
        tab.seen.clear()
        runtime.handle_backmsg(session, rerun())
        wait_for(lambda: not script_threads())  # the page has ended, and the loop has handled nothing of it
        runtime.handle_backmsg(session, rerun(fragment))
        await tab.until(ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY)
        runtime.stop()
        await runtime.stopped
        texts = [each.delta.new_element.markdown.body for each in tab.seen if each.HasField("delta")]
        return [
            *filter(None, texts),
            *(ForwardMsg.ScriptFinishedStatus.Name(each.script_finished) for each in tab.ends()),
        ]

    # In a thread of its own: Playwright keeps an event loop in this one.
    found = ThreadPoolExecutor(1).submit(lambda: asyncio.run(asyncio.wait_for(visit(), 60))).result()
    assert found == ["first", "last", "FINISHED_SUCCESSFULLY", "FINISHED_FRAGMENT_RUN_SUCCESSFULLY"]


def test_an_automatic_rerun_of_the_page_that_was_left_does_not_empty_the_next_one(runtime, tmp_path):
    (tmp_path / "page.py").write_text(PAGES)
    TURNING.clear()

    async def visit() -> tuple[list[str], list[str]]:
        await runtime.start()
        tab = Tab()
        session = runtime.connect_session(tab, user_info={})
        runtime.handle_backmsg(session, rerun())
        await tab.until(ForwardMsg.FINISHED_SUCCESSFULLY)
        every = next(each.auto_rerun.fragment_id for each in tab.seen if each.HasField("auto_rerun"))
        button = next(each.delta for each in tab.seen if each.delta.new_element.button.label == "turn")
        wait_for(lambda: not script_threads())
        tab.seen.clear()
        click = rerun(button.fragment_id, pressed=button.new_element.button.id)
        click.rerun_script.is_auto_rerun = False
        runtime.handle_backmsg(session, click)
        while sum(each.HasField("new_session") for each in tab.seen) < 2:  # the fragment, then the second page
            await asyncio.sleep(0.01)
        left = tab.seen[0].new_session.page_script_hash
        late = rerun(every)
        late.rerun_script.page_script_hash = left
        runtime.handle_backmsg(session, late)
        TURNING.set()
        while script_threads():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        runtime.stop()
        await runtime.stopped
        shown = [each.new_session.page_script_hash for each in tab.seen if each.HasField("new_session")]
        return [left], shown

    (left,), shown = ThreadPoolExecutor(1).submit(lambda: asyncio.run(asyncio.wait_for(visit(), 60))).result()
    assert shown[0] == left and shown[1] != left
    assert left not in shown[1:]


@pytest.mark.parametrize(
    ("follows", "status"),
    [
        (["charts"], ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY),
        (["bar"], ForwardMsg.FINISHED_EARLY_FOR_RERUN),  # which draws again what it has not sent
        (None, ForwardMsg.FINISHED_EARLY_FOR_RERUN),
    ],
)
def test_a_fragment_that_follows_another_does_not_take_its_end(runtime, follows: list[str] | None, status: int):
    """An end that is marked as early leaves in the browser what the fragment no longer draws."""
    queue, drawn, end = ForwardMsgQueue(), ForwardMsg(), ForwardMsg()
    drawn.delta.fragment_id = "bar"
    drawn.delta.new_element.markdown.body = "closed"
    end.script_finished = ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY
    for message in (drawn, end):
        queue.enqueue(message)
    queue.clear(retain_lifecycle_msgs=True, fragment_ids_this_run=follows)
    sent = queue.flush()
    assert (drawn in sent) == (follows == ["charts"]) and sent[-1].script_finished == status


def test_the_session_of_a_closed_tab_goes_when_nobody_can_come_back_to_it(runtime):
    async def visit() -> tuple[weakref.ref[AppSession], bool]:
        await runtime.start()
        tab = Tab()
        number = runtime.connect_session(tab, user_info={})
        runtime.handle_backmsg(number, rerun(query="drawn=0"))
        await tab.until(ForwardMsg.FINISHED_SUCCESSFULLY)
        wait_for(lambda: not script_threads())
        session = weakref.ref(runtime._session_mgr.get_session_info(number).session)
        kept = weakref.ref(session().session_state["kept"])
        assert kept()
        runtime.disconnect_session(number)
        await runtime.removed.wait()
        gc.collect()
        gone = kept() is None  # while the runtime goes on, whose loop still refers to the session
        runtime.stop()
        await runtime.stopped
        return session, gone

    session, gone = ThreadPoolExecutor(1).submit(lambda: asyncio.run(asyncio.wait_for(visit(), 60))).result()
    gc.collect()
    assert gone and session() is None


def test_what_callbacks_refer_to_goes_with_the_page_after_the_one_that_replaced_it(runtime):
    async def visit() -> tuple[list[bool], bool]:
        await runtime.start()
        tab = Tab()
        number = runtime.connect_session(tab, user_info={})
        session = runtime._session_mgr.get_session_info(number).session
        kept: list[weakref.ref[Kept]] = []

        async def draw(drawn: int, pressed: str = "") -> str:
            tab.seen.clear()
            runtime.handle_backmsg(number, rerun(query=f"drawn={drawn}", pressed=pressed))
            await tab.until(ForwardMsg.FINISHED_SUCCESSFULLY)
            wait_for(lambda: not script_threads())
            kept.append(weakref.ref(session.session_state["kept"]))
            return next(id for each in tab.seen if (id := each.delta.new_element.button.id))

        first = await draw(0)
        await draw(1)
        first_kept = kept[0]()
        await draw(2, pressed=first)  # a click on a button that the page has just replaced
        assert first_kept
        pressed = first_kept.pressed
        del first_kept
        await draw(3)
        await draw(4)
        gc.collect()
        left = [each() is not None for each in kept]
        runtime.stop()
        await runtime.stopped
        return left, pressed

    left, pressed = ThreadPoolExecutor(1).submit(lambda: asyncio.run(asyncio.wait_for(visit(), 60))).result()
    assert pressed
    assert left == [False, False, False, True, True]
