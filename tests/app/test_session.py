"""Sessions as files: what is kept comes back, what is hostile is refused in a sentence."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from markdown_it import MarkdownIt

from binade.app.pages.registry import PAGES
from binade.app.sessions import notes, session, storage
from binade.app.sessions.pins import missing_runs
from binade.app.sessions.session import Pin, RunReference, Session, SessionError, View

pytestmark = pytest.mark.slow

VIEW = View("explore", {"quant_type": ["mxfp8"], "by": ["layer_index"]})

# What a session may hold, said once more and apart from its schema.
letters = some.characters(exclude_categories=("Cs", "Cc"))
lines = some.text(some.one_of(letters, some.just("\n")), max_size=60)
params = some.dictionaries(
    some.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20), some.lists(lines, max_size=4), max_size=5
)
pages = some.sampled_from([*PAGES])
pins = some.builds(Pin, pages, params, some.text("abc_019", max_size=20), lines)
marks = some.builds(
    RunReference, some.text(letters, min_size=1, max_size=40), some.text("0123456789abcdef", min_size=64, max_size=64)
)
sessions = some.builds(
    Session,
    id=some.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,8}){0,3}", fullmatch=True),
    name=some.text(letters, max_size=80).map(lambda text: f"n{text}"),
    created=some.datetimes().map(lambda time: f"{time:%Y-%m-%dT%H:%M:%S}".rjust(19, "0") + "+00:00"),
    saved=some.just("2026-01-02T03:04:05.678+00:00"),
    view=some.builds(View, pages, params),
    notes=lines,
    pins=some.lists(pins, max_size=3).map(tuple),
    runs=some.lists(marks, max_size=3).map(tuple),
)
anything = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(max_size=20)
    | some.sampled_from(["", "x" * 200_000]),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def content(**changes: Any) -> dict[str, Any]:
    whole = json.loads(
        session.to_json(session.new("A finding", VIEW, notes="It *flushes*.", pins=(Pin("map", {}, "ranking"),)))
    )
    return whole | changes


def refusal(given: bytes | dict[str, Any]) -> str:
    """Why it is refused: one sentence, of a length that can be read."""
    raw = given if isinstance(given, bytes) else json.dumps(given).encode()
    with pytest.raises(SessionError) as refused:
        session.parse(raw)
    text = str(refused.value)
    assert "\n" not in text and len(text) < 400 and text.startswith(session.REFUSED) and text.endswith(".")
    return text


@settings(max_examples=500)
@given(sessions)
def test_what_is_written_is_read(one: Session):
    assert session.parse(session.to_json(one).encode()) == one


def places(node: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value within a JSON document."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path] + [place for key, value in inner for place in places(value, (*path, key))]


@pytest.mark.thorough
@settings(max_examples=1000)
@given(some.data())
def test_whatever_stands_anywhere_is_taken_or_refused_in_a_sentence(data: some.DataObject):
    document = content(runs=[{"run_id": "r", "hash": "0" * 64}])
    place = data.draw(some.sampled_from(places(document)[1:]))
    node = document
    for key in place[:-1]:
        node = node[key]
    if data.draw(some.booleans()):
        node[place[-1]] = data.draw(anything)
    elif isinstance(node, dict):
        node[data.draw(some.text(max_size=10))] = data.draw(anything)
        if data.draw(some.booleans()):
            node.pop(place[-1], None)
    raw = json.dumps(document).encode()
    try:
        taken = session.parse(raw)
    except SessionError:
        refusal(raw)
    else:
        assert json.loads(session.to_json(taken)) == document  # nothing dropped, nothing made up


@settings(max_examples=700)
@given(
    some.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()),
    some.integers(0, 400),
    some.integers(0, 400),
)
def test_bytes_of_any_kind_are_refused(junk: bytes, start: int, length: int):
    refusal(junk)
    whole = json.dumps(content()).encode()
    cut = whole[:start] + junk + whole[start + max(length, 1) :]
    try:
        assert isinstance(session.parse(cut), Session)
    except SessionError:
        refusal(cut)


@settings(max_examples=250)
@given(some.text(max_size=60) | some.from_regex(r"(\.\./|/|\\|%2e|[a-z0-9-]){1,20}"))
def test_no_id_leads_out_of_the_folder(tmp_path_factory: pytest.TempPathFactory, text: str):
    root = tmp_path_factory.getbasetemp()
    with pytest.raises(SessionError, match="session"):
        storage.load(root, text)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b" " * (session.LONGEST_FILE + 1), "bytes"),
        (b'{"binade_session": 1, "binade_session": 1}', "duplicate key"),
        (b'{"binade_session": NaN}', "NaN"),
        (b'{"binade_session": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"binade_session": true}', "whole number"),
        (b'{"binade_session": 2}', "version is 2"),
        (b'{"binade_bundle": 1}', "another kind of file"),
        (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os", "not UTF-8"),  # a pickle
    ],
    ids=["lists", "objects", "empty", "bytes", "long", "twice", "nan", "digits", "bool", "version", "other", "pickle"],
)  # fmt: skip
def test_hostile_files(raw: bytes, words: str):
    assert words in refusal(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": " "}, "name"),
        ({"name": "a\nb"}, "name contains a control character"),
        ({"name": "x" * 121}, "name is longer than 120"),
        ({"id": "../up"}, "id does not have the expected form"),
        ({"id": "ab\n"}, "id does not have the expected form"),
        ({"notes": 3}, "notes is not a string"),
        ({"notes": "\ud800"}, "an unpaired surrogate"),
        ({"notes": "x" * 50_001}, "notes is longer than 50000"),
        ({"pins": [{"page": "map"}]}, "pins.0 lacks params, chart, caption"),
        ({"pins": [{}] * 201}, "pins has more than 200"),
        ({"view": {"page": "admin", "params": {}}}, "view.page is not one of"),
        ({"view": {"page": "notebook", "params": {"q": ["x" * 4001]}}}, "view.params.q.0 is longer than 4000"),
        ({"view": {"page": "notebook", "params": {"__proto__ ": []}}}, "not have the expected form"),
        ({"extra": 1}, "unknown name"),
        ({"saved": "yesterday"}, "saved does not have the expected form"),
        ({"runs": [{"run_id": "r", "hash": "z" * 64}]}, "runs.0.hash does not have the expected form"),
    ],
)
def test_refusals_say_what_and_where(changes: dict[str, Any], words: str):
    assert words in refusal(content(**changes))


def _view(params: dict[str, Any]) -> dict[str, Any]:
    return {"view": {"page": "explore", "params": params}}


LARGE = {
    "pins": {"pins": [{}] * 450_000},
    "marks": {"runs": [{}] * 450_000},
    "texts": _view({"a": [1] * 600_000}),
    "names": _view({f"A{index}": [] for index in range(120_000)}),
    "every": {
        "pins": [{"page": "explore", "params": {name: ["x"] * 600 for name in "abc"}, "chart": "", "caption": ""}] * 199
    },
    "within": {"pins": [{"page": "x", "params": {name: [1] * 240 for name in "a"}, "chart": "", "caption": ""}] * 199},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("changes", LARGE.values(), ids=LARGE)
def test_a_large_file_is_refused_at_once(changes: dict[str, Any]):
    raw = json.dumps(content(**changes)).encode()
    assert len(raw) < session.LONGEST_FILE
    start = time.process_time()
    refusal(raw)
    assert time.process_time() - start < 2  # finding all that is wrong takes up to 12 s


@settings(max_examples=250)
@given(some.text(letters, min_size=1, max_size=120) | some.from_regex(r"([a-z0-9]{1,3}[ ?-]){1,30}", fullmatch=True))
def test_a_session_of_any_name_can_be_saved(name: str):
    name = f"{name[:119]}!"  # a name that is nothing but spaces is refused
    one = session.new(name, VIEW)
    assert session.parse(session.to_json(one).encode()) == one
    assert len(one.id) <= 39 and re.fullmatch(r"([a-z0-9]+-){0,8}[0-9a-f]{6}", one.id)


def test_the_id_is_of_the_first_words():
    assert session.new("Is QK or PV at L1 the 1 to go?", VIEW).id.startswith("is-qk-or-pv-at-l1-the-1-")


@pytest.mark.parametrize("name", ["absent", "..", ".", ".sessions", "a/../..", "x" * 300, "nul\0"])
def test_runs_that_are_not_here_are_named(tmp_path: Path, name: str):
    (tmp_path / "run.json").write_text("{}")
    one = session.new("n", VIEW, runs=(RunReference(name, "0" * 64),))
    assert ["is missing" in problem for problem in missing_runs(tmp_path, one)] == [True]


HALF = 25_000
DEEP = {
    "quotes": ">" * 2 * HALF,
    "lists": "1. " * (2 * HALF // 3),
    "stars": f"{'*' * (HALF - 1)}x{'*' * (HALF - 1)}",
    "emphasis": "*a _b " * 4000 + "c_ d* " * 4000,
    "colours": ":red[" * 8000 + "x" + "]" * 8000,
    "formula": f"${'{' * (HALF - 1)}{'}' * (HALF - 1)}$",
    "lines": "\n".join("  " * depth + "- a" for depth in range(200)),
    "late": "fine\n\n" + "> " * 3000 + "![p](http://elsewhere/x.png)",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_notes_nested_too_deeply_are_plain(text: str):
    *_, block = shown = MarkdownIt("commonmark").parse(notes.safe(text))
    assert [token.type for token in shown] == ["paragraph_open", "inline", "paragraph_close", "code_block"]
    assert block.content == f"{text}\n"


def test_notes_within_reason_are_left_alone():
    text = "# A\n\n" + "\n".join("  " * depth + "- *a* **b _c_** `a[0]: x`" for depth in range(8)) + "\n> > > quoted"
    assert notes.safe(text) == text


HOSTILE_LINKS = (
    "[bank](https://evil.example/a?b=c) [own](/?session=x) [t](https://evil.example 'title') [m](<https://evil.example>)",
    "[go](javascript:alert(1)) [d](data:text/html,x) <data:image/png;base64,AA==> <JavaScript:alert(1)> <a@b.example>",
    "[a][b] [b] [b][] ![a][b]\n\n[b]: https://evil.example/y.png\n> - [c]: data:text/html,x\r[c]: https://evil.example\n\n[c]",
    "![alt](http://evil.example/x.png) [![p](http://a.example)](https://evil.example) <https://xn--ggle-55da.example>",
    "\\\\[a](https://evil.example) \\\\![a](https://evil.example) \\\\<javascript:alert(1)> <https://a@evil.example>",
    "<a href='https://evil.example'>bank</a> $\\href{https://evil.example}{bank}$ [a\n](https://evil.example)",
)


class Links(HTMLParser):
    """The links of a page, each with its attributes and its text, and whether there is a picture."""

    def __init__(self, page: str):
        super().__init__()
        self.links: list[tuple[dict[str, str | None], str]] = []
        self.pictures = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pictures += tag == "img"
        if tag == "a":
            self.links.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.links:
            self.links[-1] = (self.links[-1][0], self.links[-1][1] or data)


@settings(max_examples=250)
@given(some.text("![]()a:1. \\\n\r`<>", max_size=40), some.sampled_from(HOSTILE_LINKS))
def test_notes_hold_no_picture_and_links_show_where_they_go(text: str, links: str):
    found = Links(notes.to_html(f"{text}{links}"))
    assert not found.pictures
    for attributes, shown in found.links:
        assert attributes["href"] in (shown, f"mailto:{shown}") and shown.startswith(("http://", "https://", "a@"))
        assert attributes["rel"] == "noopener noreferrer"


def test_the_address_of_a_link_stands_beside_its_text():
    ((attributes, shown),) = Links(notes.to_html("see [the paper](https://arxiv.example/abs/1) for more")).links
    assert attributes["href"] == shown == "https://arxiv.example/abs/1"
