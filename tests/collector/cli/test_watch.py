"""binade run --watch, and the order of events."""

from __future__ import annotations

import pytest

from binade.data.run.events import Event, EventKind, append_event, read_events

EVENT = Event(
    EventKind.TRIGGER, 7, "layer1.fc1 input: absmax is 9, above 8", "2026-01-01T00:00:00+00:00", trigger="absmax > 8"
)


@pytest.mark.slow
def test_a_run_is_watched(collect):
    words = ("--train-iters", "4", "--watch", "every 2 steps", "--trigger", "loss > 0,nan", "--capture-steps", "0")
    run = collect("--control-iter", "1", *words)
    (event,) = read_events(run.directory)
    assert (event.trigger, event.iteration) == ("loss > 0", 0)
    assert run.config["watch"] == "every 2 steps" and run.config["trigger"] == ["loss > 0", "nan"]


def test_bad_words(command, capsys):
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
