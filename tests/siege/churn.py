"""Runs that come and go while pages are drawn: a page shows one state of the index."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from binade.app.frame import state
from binade.app.pages.registry import PAGES, PART
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from tests.app.conftest import close_pages
from tests.data.builder import assorted, make_run
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import show

VIEWS = [
    View(page.name, {PART: [part.name]}) for page in PAGES.values() for part in page.parts.values() if part.question
]


def make_runs(root: Path) -> None:
    for seed in range(6):
        recipe = ("mxfp4", "mxfp8")[seed % 2]
        run = make_run(root, assorted(seed, recipe=recipe), recipe=recipe, seed=seed)
        for iteration in range(3):
            run.append_loss({"iteration": iteration, "loss": 5.0 - iteration, "time": 0.0})


@attack("A page is drawn from one state of the index while runs come and go, or says that they have changed", tries=12)
def churning_roots(attempt: Attempt) -> None:
    root, away = attempt.place / "runs", attempt.place / "away"
    root.mkdir()
    away.mkdir()
    make_runs(root)
    show(root, "map")
    opened = state._open(str(root)).opened
    runs, tensors = list(opened.runs()["run_id"]), list(opened.tensors()["tensor_id"])
    end = threading.Event()
    chance = random.Random(attempt.random.random())

    def move() -> None:
        while not end.wait(0.02):
            chosen = chance.choice(runs)
            here, there = (root, away) if (root / chosen).exists() else (away, root)
            (here / chosen).rename(there / chosen)
            if chance.random() < 0.7:
                opened.sync()

    def draw(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(30):
            view = chance.choice(VIEWS)
            if chance.random() < 0.3:
                view = view.changed(run_id=[chance.choice(runs)])
            if chance.random() < 0.3:
                view = view.changed(tensor=[chance.choice(tensors)])
            for problem in view.draw(opened).problems:
                check_sentence(problem)

    try:
        with ThreadPoolExecutor(3) as threads:
            moving = threads.submit(move)
            try:
                for drawing in [threads.submit(draw, attempt.random.getrandbits(32)) for _ in range(2)]:
                    drawing.result()
                for _ in range(3):
                    view = attempt.choose(VIEWS)
                    attempt.case = f"{view.page}, {view.part}"
                    show(root, view.page, **view.params)
            finally:
                end.set()
            moving.result()
        attempt.times = 63
        assert not _remaining(opened)
    finally:
        close_pages([str(root)])


def _remaining(opened: Catalog) -> int:
    """The snapshots that nobody has ended."""
    return sum(snapshot.cursor is not None for snapshot in opened._index._snapshots)
