"""Every question, saved in a session and sent as a bundle, shows what it showed when it was pinned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from binade.app.pages.registry import PAGES, PART
from binade.app.questions.registry import QUESTIONS
from binade.app.sessions import pins, session, storage
from binade.app.sessions.session import Pin
from binade.app.view.params import AnyText
from binade.app.view.view import View
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from tests.app.test_live import IDS, SETS, VIEWS, answer

pytestmark = pytest.mark.slow


def pinned(catalog: Catalog, names: Sequence[str]) -> list[Pin]:
    """Questions of the mxfp4 run, with the run or the tensor that a parameter refers to chosen from another run."""
    runs = catalog.runs().set_index("recipe")["run_id"]
    tensors = catalog.tensors().query("tensor_name == 'input' and layer_index == 1").set_index("run_id")["tensor_id"]
    chosen = {"run": ["mxfp8", "hifp8"], "tensor": ["mxfp8", "hifp8"]}
    made = []
    for question, address in (VIEWS[IDS.index(name)] for name in names):
        params = {name: [text] for name, text in address.items()} | {"run_id": [runs["mxfp4"]]}
        left = {kind: list(names) for kind, names in chosen.items()}
        for name, param in View(question.page, params).params_in(catalog).items():
            if name in question.uses and param.refers_to:
                run = runs[left[param.refers_to].pop(0)]
                params[name] = [run if param.refers_to == "run" else tensors[run].iloc[0]]
        made.append(Pin(question.page, params))
    return made


def test_what_names_a_run_or_a_tensor_says_so(catalog: Catalog):
    """A parameter that takes the id of a run, or of a tensor, refers to it."""
    runs = catalog.runs()["run_id"].tolist()
    tensor = str(catalog.tensors(limit=1)["tensor_id"].iloc[0])
    for view in (View(page.name, {PART: [part]}) for page in PAGES.values() for part in page.parts):
        for name, param in view.params_in(catalog).items():
            kinds = [kind for kind, text in (("run", runs[0]), ("tensor", tensor)) if param.value_of(text) == text]
            assert isinstance(param, AnyText) or [param.refers_to] == (kinds or [param.refers_to]), (view, name)


@pytest.mark.thorough
@pytest.mark.parametrize("names", SETS)
def test_saved_and_bundled_it_shows_the_same(collected: Path, tmp_path: Path, names: Sequence[str]):
    """Each question's answer as it was pinned, in the saved session, and in a root that has imported the bundle."""
    with Catalog.open(collected) as catalog:
        catalog.cache = ResultCache(1 << 30, outside=(Catalog,))
        made = pinned(catalog, names)
        view = View(made[0].page, made[0].params)
        drawn = [answer(pins.draw(catalog, pin)) for pin in made]
        kept = [pins.refreshed(catalog, session.new("kept", View(pin.page, pin.params), pins=(pin,))) for pin in made]
        kept = [session.parse(session.to_json(each).encode()) for each in kept]
        saved = [answer(pins.draw(catalog, each.pins[0], each.run_ids)) for each in kept]
        together = pins.refreshed(catalog, session.new("together", view, pins=tuple(made)))
        storage.export_bundle(catalog, together, tmp_path / "all.zip")
    (tmp_path / "root").mkdir()
    storage.import_bundle(tmp_path / "root", tmp_path / "all.zip")
    with Catalog.open(tmp_path / "root") as opened:
        sent = [answer(pins.draw(opened, each.pins[0], each.run_ids)) for each in kept]
    for name, as_drawn, as_saved, as_sent in zip(names, drawn, saved, sent, strict=True):
        assert as_saved == as_drawn and as_sent == as_drawn, name


def test_all_questions_are_kept():
    assert {question.name for question, _ in VIEWS} == {question.name for question in QUESTIONS}
