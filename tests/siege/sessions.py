"""Sessions and runs from someone else, with texts that try to make Vega-Lite execute or fetch something."""

from __future__ import annotations

from binade.app.pages.registry import PAGES, PART
from binade.app.sessions import pins, storage
from binade.app.sessions.session import Pin, SessionError, View, new
from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS
from tests.app.test_injection import PAYLOADS, check, check_pictures, make_hostile
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import show
from tests.siege.urls import WORDS


@attack(
    "The session is refused in one sentence, or its page is drawn and all of its texts are shown literally",
    tries=200,
    share=2.0,
)
def hostile_sessions(attempt: Attempt) -> None:
    chance, root = attempt.random, attempt.once("runs", make_hostile)
    page, part = attempt.choose(
        [(page, name) for page in PAGES for name, part in PAGES[page].parts.items() if part.kept]
    )
    texts = [*PAYLOADS, *PAYLOADS, *WORDS]
    with Catalog.open(root) as opened:
        declared = View(page, {PART: [part]}).params_in(opened)
        names = chance.sample([*FIELDS, *declared], chance.randrange(4))
        params = {PART: [part]} | {name: [chance.choice(texts)] for name in names}
        attempt.case = f"{page}?{ascii(params)[:200]}"
        pin = Pin(page, params, caption=chance.choice(texts))
        drawn = pins.draw(opened, pin)
        check(drawn)
        check_pictures(drawn)
    try:
        one = new(chance.choice(texts), View(page, params), notes=chance.choice(texts), pins=(pin,))
        saved = storage.create(root, one).session
    except SessionError as error:
        check_sentence(error)
        return
    show(root, "notebook", part="saved")
    show(root, "notebook", session=saved.id)
    storage.delete(root, saved.id)
