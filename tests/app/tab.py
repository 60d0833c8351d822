"""A tab of the app without a browser: the websocket and the upload requests that a browser's page makes."""

from __future__ import annotations

import re
import socket
from http.client import HTTPConnection, HTTPResponse
from types import TracebackType
from urllib.parse import urlsplit

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect

FRAME = (
    b'--frame\r\nContent-Disposition: form-data; name="file"; filename="a.json"\r\n\r\n',
    b"\r\n--frame--\r\n",
)


class Tab:
    """Opens the app at an address from this machine's address `source`, with more headers."""

    def __init__(self, address: str, source: str = "127.0.0.1", origin: str = "", **headers: str):
        self.host, self.source, self.headers = urlsplit(address).netloc, source, headers
        cookie = self._request("GET", "/_stcore/health").headers["Set-Cookie"] or ""
        self.token = found[1] if (found := re.search(r"_streamlit_xsrf=([^;]+)", cookie)) else ""
        name, port = self.host.split(":")
        self.socket = connect(
            f"ws://{self.host}/_stcore/stream",
            sock=socket.create_connection((name, int(port)), source_address=(source, 0)),
            origin=origin or address,
            subprotocols=["streamlit", self.token or "none"],
            additional_headers={"Cookie": f"_streamlit_xsrf={self.token}", **headers},
            max_size=None,
            open_timeout=120,
            legacy=True,
        )
        self.session = ""

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def visit(self, page: str, query: str = "") -> str:
        """Open a page, wait until its script has ended, and return what it has sent as text."""
        message = BackMsg()
        message.rerun_script.page_name, message.rerun_script.query_string = page, query
        self.socket.send(message.SerializeToString())
        sent = []
        while True:
            answer = ForwardMsg.FromString(self.socket.recv(timeout=120))
            if answer.HasField("new_session"):
                self.session = answer.new_session.initialize.session_id
            sent.append(str(answer))
            if answer.HasField("script_finished") and answer.script_finished == ForwardMsg.FINISHED_SUCCESSFULLY:
                return "".join(sent)

    def put(self, content: bytes, file: str = "a") -> int:
        """Send a file as the page does; the HTTP status."""
        return self._request("PUT", self.path(file), FRAME[0] + content + FRAME[1]).status

    def begin(self, length: int | None, file: str = "a") -> HTTPConnection:
        """Send the head of such a request, with this Content-Length or chunked, and nothing of the file yet."""
        framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        return self._sent("PUT", self.path(file), framing)

    def path(self, file: str) -> str:
        return f"/_stcore/upload_file/{self.session}/{file}"

    def held(self) -> int:
        """The bytes of all uploaded files in the server, as Streamlit's metrics say."""
        text = self._request("GET", "/_stcore/metrics").content.decode()
        found = re.findall(r'cache_memory_bytes\{cache_type="UploadedFileManager".*\} (\d+)', text)
        return sum(map(int, found))

    def _sent(self, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> HTTPConnection:
        link = HTTPConnection(self.host, timeout=60, source_address=(self.source, 0))
        if token := getattr(self, "token", ""):
            headers = {**headers, "X-Xsrftoken": token, "Cookie": f"_streamlit_xsrf={token}"}
        link.putrequest(method, path)
        for name, value in {**headers, **self.headers, "Content-Type": "multipart/form-data; boundary=frame"}.items():
            link.putheader(name, value)
        link.endheaders(body)
        return link

    def _request(self, method: str, path: str, body: bytes | None = None) -> HTTPResponse:
        link = self._sent(method, path, {"Content-Length": str(len(body))} if body else {}, body)
        answer = link.getresponse()
        answer.content = answer.read()  # type: ignore[attr-defined]
        link.close()
        return answer
