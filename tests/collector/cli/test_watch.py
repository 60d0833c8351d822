"""binade run --watch and binade watch, and what alerts send."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from binade.collector.capture.alerts import scalars, webhook
from binade.collector.cli.watch_command import _lines
from binade.collector.errors import ConfigError
from binade.data.events import Event, EventKind, append_event, read_events
from binade.data.runs import RunWriter
from tests.conftest import ended, start_python

EVENT = Event(
    EventKind.TRIGGER, 7, "layer1.fc1 input: absmax is 9, above 8", "2026-01-01T00:00:00+00:00", trigger="absmax > 8"
)


@pytest.mark.slow
def test_a_run_is_watched_and_followed(collect, command, capsys):
    words = ("--train-iters", "4", "--watch", "every 2 steps", "--trigger", "loss > 0,nan", "--capture-steps", "0")
    run = collect("--control-iter", "1", *words)
    (event,) = read_events(run.directory)
    assert (event.trigger, event.iteration) == ("loss > 0", 0)
    assert run.config["watch"] == "every 2 steps" and run.config["trigger"] == ["loss > 0", "nan"]
    capsys.readouterr()
    assert command("watch", str(run.directory.parent), "--once") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{run.run_id}: {event}"
    assert "done, iteration 3, loss" in second and "largest magnitude" in second and "iteration 2)" in second


def test_an_empty_root_and_bad_words(command, tmp_path, capsys):
    assert command("watch", str(tmp_path), "--once") == 0
    assert "no run" in capsys.readouterr().out
    assert command("run", "--watch", "now and then") == 2
    assert "every 100 steps" in capsys.readouterr().err


def test_events_of_ranks_are_in_order_and_a_cut_line_ends_a_file(tmp_path):
    (tmp_path / "ranks").mkdir()
    found = [Event(EventKind.NON_FINITE, 3, "x", "t", rank, order=order) for rank, order in ((0, 9), (1, 4))]
    for event in (EVENT, *found):
        append_event(tmp_path, event)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"kind": "trigg')
    assert read_events(tmp_path) == [found[1], found[0], EVENT]


def test_a_late_event_of_another_rank_is_printed(tmp_path):
    run, seen = RunWriter.create(tmp_path, "mine", {}, ranks=2), {}
    append_event(run.directory, EVENT)
    assert len(list(_lines(tmp_path, seen))) == 2
    late = replace(EVENT, iteration=6, rank=1)
    append_event(run.directory, late)
    assert next(_lines(tmp_path, seen)) == f"{run.run_id}: {late}"


def told(alert) -> None:
    alert(EVENT)
    for each in threading.enumerate():
        if each.name == "webhook":
            each.join()


def test_a_webhook_posts_json_and_survives_silence():
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_):
            pass

    done = threading.Event()
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    webhook(f"http://127.0.0.1:{server.server_port}/hook")(EVENT)
    assert done.wait(20)
    thread.join()
    server.server_close()
    assert received[0]["trigger"] == "absmax > 8" and "iteration 7, trigger" in received[0]["text"]
    alert = webhook(f"http://127.0.0.1:{server.server_port}/hook")
    with pytest.warns(UserWarning, match="did not receive the event of iteration 7"):
        told(alert)
    for url in ("file:///etc/passwd", "http://["):
        with pytest.raises(ConfigError, match="http"):
            webhook(url)


@pytest.mark.parametrize(
    ("answer", "warning"), [("HTTP/1.0 204 x", ""), ("what", "did not receive the event of iteration 7: what")]
)
def test_an_alert_outlives_the_run_and_an_answer_that_is_not_http_is_a_warning(answer, warning):
    """The process ends at once after the alert."""
    code = (
        "import sys; from binade.collector.capture.alerts import webhook\n"
        "from binade.data.events import Event, EventKind\n"
        "webhook(sys.argv[1])(Event(EventKind.TRIGGER, 7, 'x', 't', 0))"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = start_python("-c", code, url)
        server.settimeout(120)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(120)
            received = b""
            while b"iteration 7" not in received:
                part = connection.recv(4096)
                assert part, "the process has ended"
                received += part
            connection.sendall(answer.encode() + b"\r\n\r\n")
        err = ended(process).stderr
    assert process.returncode == 0 and "Traceback" not in err and warning in err and bool(err) == bool(warning)


def test_scalars_go_to_either_kind_of_writer():
    class Board:
        def __init__(self):
            self.got = []

        def add_scalar(self, *given):
            self.got.append(given)

    class Run:
        def __init__(self):
            self.got = []

        def log(self, given):
            self.got.append(given)

    board, run = Board(), Run()
    scalars(board)(EVENT)
    scalars(run)(EVENT)
    assert board.got == [("binade/trigger", 1, 7)] and run.got == [{"binade/trigger": 1, "binade/iteration": 7}]
    with pytest.raises(ConfigError, match="SummaryWriter"):
        scalars(object())
