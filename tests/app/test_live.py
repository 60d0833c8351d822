"""Every question of a root that grows: once the catalog has synchronized, it answers as a fresh one does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from binade.app.draw.figure import Drawn
from binade.app.questions.registry import QUESTIONS
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE
from binade.data.run.run_writer import RunWriter
from tests.app import roots
from tests.app.test_pins import drawn_again
from tests.data.builder import add_segment

pytestmark = pytest.mark.slow

VIEWS = [
    (question, question.address | view)
    for question in QUESTIONS
    for view in ([{"of": name} for name in ("cost", "gradients", "ladder")] if question.name == "recipes" else [{}])
]
IDS = [f"{question.name}-{address.get('of', '')}".strip("-") for question, address in VIEWS]
SOME = ("explore", "recipes-cost", "recipes-gradients", "why")
SETS = (pytest.param(SOME, id="some"), pytest.param(IDS, id="all", marks=pytest.mark.thorough))
BACKWARD = {"operation": "backward"}
Answer = tuple[str, tuple[str, ...], Any, Any]


def answer(drawn: Drawn) -> Answer:
    tables = {name: frame.to_json() for name, frame in drawn.tables.items()}
    return drawn.verdict, drawn.problems, drawn_again(drawn.figures), tables


def answers(catalog: Catalog, names: Sequence[str]) -> dict[str, Answer]:
    found = {}
    for name in names:
        question, address = VIEWS[IDS.index(name)]
        found[name] = answer(pins.draw(catalog, Pin(question.page, {key: [text] for key, text in address.items()})))
    return found


def proceed(run: Path, seed: int) -> None:
    """Record a third layer of both iterations in a run, and a loss."""
    recipe = next(name for name in ("bf16", "hifp8", "mxfp8", "mxfp4") if f"_{name}_" in run.name)
    random = torch.Generator().manual_seed(seed)
    rounded = {} if recipe == "bf16" else {"format": recipe}
    made = []
    for iteration in (0, 1):
        words = {"iteration": iteration, "layer_index": 3, "recipe": recipe, "quant_type": recipe}
        made += [
            (torch.randn(64, 96, generator=random) * 9, words | rounded),
            (torch.randn(64, 96, generator=random), words | BACKWARD | {"tensor_name": "grad_output"} | rounded),
            (torch.randn(64, 96, generator=random), words | BACKWARD | {"tensor_name": "grad_weight", "phase": "post"}),
            (torch.randn(1, 4, 8, 8, generator=random).softmax(-1), words | {"tensor_name": "attention_probs"}),
        ]
    writer = RunWriter.reopen(run)
    add_segment(writer, made, first=5000)
    writer.append_loss({"iteration": 2, "loss": 4.0 + seed, "data_sha256": 64 * "0"})  # on the same data
    writer.finish(DONE)


@pytest.mark.parametrize("names", SETS)
def test_a_question_follows_its_runs(collected: Path, tmp_path: Path, names: Sequence[str]):
    """Its answer after the runs have proceeded is that of a catalog that is opened then."""
    root = roots.copy(collected, tmp_path)
    with Catalog.open(root) as live:
        live.cache = ResultCache(1 << 30, outside=(Catalog,))
        before = answers(live, names)
        for seed, run in enumerate(roots.runs_of(root)):
            proceed(run, seed)
        live.sync()
        after = answers(live, names)
    with Catalog.open(root) as fresh:
        for name, wanted in answers(fresh, names).items():
            assert after[name] == wanted, name
    assert {"recipes-cost", "recipes-gradients", "explore"} <= {name for name in names if before[name] != after[name]}
    assert after["recipes-gradients"][2], "no chart was compared"
