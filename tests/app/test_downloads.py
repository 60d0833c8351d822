"""Files that are sent from the disk: each session has its latest one, whoever knows its address gets all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.types import Message

from binade.app.frame import downloads
from binade.app.frame.downloads import DownloadError
from binade.app.sessions import storage
from binade.app.sessions.session import RunReference, new
from binade.app.view.view import View
from binade.data.exchange.bundle import BundleError
from binade.data.index.catalog import Catalog
from binade.data.run.directory import fingerprint
from tests.data.builder import assorted, make_run


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downloads, "_held", {})


def as_session(monkeypatch: pytest.MonkeyPatch, session: str) -> None:
    monkeypatch.setattr(downloads, "get_script_run_ctx", lambda: SimpleNamespace(session_id=session))


def get(url: str) -> tuple[int, dict[str, str], list[bytes]]:
    """(status, headers, the pieces of the body as they are sent)."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": url, "headers": [], "query_string": b""}
    scope["path_params"] = {"token": url.rpartition("/")[2]}
    response = downloads.respond(Request(scope))
    asyncio.run(response(scope, receive, send))
    start, *bodies = sent
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, [body["body"] for body in bodies if body["body"]]


def file_of(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_file_comes_in_pieces_after_its_name_is_gone(tmp_path: Path):
    content = bytes(range(256)) * 10_000
    path = file_of(tmp_path / "a.zip", content)
    url = downloads.offer(path, "mine.zip", "application/zip")
    path.unlink()
    for _ in range(2):  # also again
        status, headers, pieces = get(url)
        assert (status, b"".join(pieces)) == (200, content) and max(map(len, pieces)) <= downloads.CHUNK
        assert headers["content-length"] == str(len(content)) and headers["content-type"] == "application/zip"
        assert headers["content-disposition"] == 'attachment; filename="mine.zip"'
    for other in (url[:-1], url + "a", "/download/", "/download/x"):
        assert get(other)[0] == 404


def test_a_session_holds_its_latest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, other = file_of(tmp_path / "a", b"first"), file_of(tmp_path / "b", b"second")
    as_session(monkeypatch, "one")
    first = downloads.offer(path, "a", "text/html")
    second = downloads.offer(other, "b", "text/html")
    as_session(monkeypatch, "two")
    third = downloads.offer(path, "a", "text/html")
    assert [get(url)[0] for url in (first, second, third)] == [404, 200, 200]
    active = SimpleNamespace(is_active_session=lambda session: session == "two")
    monkeypatch.setattr(downloads.runtime, "get_instance", lambda: active)
    downloads.close_disconnected()
    assert [get(url)[0] for url in (second, third)] == [404, 200]


def test_size_and_total_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a"
    with open(path, "wb") as file:
        file.truncate(downloads.LARGEST + 1)
    with pytest.raises(DownloadError, match="the limit is 64 MiB"):
        downloads.offer(path, "a", "text/html")
    with open(path, "r+b") as file:
        file.truncate(downloads.LARGEST)
    for number in range(downloads.MOST // downloads.LARGEST):
        as_session(monkeypatch, str(number))
        downloads.offer(path, "a", "text/html")
    as_session(monkeypatch, "one more")
    with pytest.raises(DownloadError, match="Other users"):
        downloads.offer(path, "a", "text/html")


def test_a_large_bundle_is_refused_before_it_is_written(tmp_path: Path):
    root, target = tmp_path / "root", tmp_path / "out" / "a.zip"
    run = make_run(root, assorted(1))
    session = new("mine", View("explore", {}), runs=(RunReference(run.run_id, fingerprint(run.directory)),))
    size = sum(path.stat().st_size for path in run.directory.rglob("*.pt"))
    with Catalog.open(root) as catalog:
        with pytest.raises(BundleError, match=rf"at most {size:,}\. .*binade bundle export {session.id} --values all"):
            storage.export_bundle(catalog, session, target, "all", most=size)
        assert list(target.parent.iterdir()) == []
        written = storage.export_bundle(catalog, session, target, "all", most=size + 100_000)
    assert written.nbytes < size + 100_000 and target.exists()
