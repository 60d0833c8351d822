"""A run that is deleted and recorded again under the same id: no answer to the first one is shown for the second."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from binade.app.questions.registry import QUESTIONS
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.app.view.view import View
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from tests.app.test_live import answer
from tests.data.builder import make_run

NAMES = [question.name for question in QUESTIONS if question.of_values or question.name == "what_if"]


def record(root: Path, seed: int) -> str:
    """The id of one of two tensors that differ by seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(64, 96, generator=generator), {"format": "mxfp4", "iteration": i}) for i in range(2)]
    shutil.rmtree(root / "again", ignore_errors=True)
    make_run(root, tensors).directory.rename(root / "again")
    with Catalog.open(root) as catalog:
        return str(catalog.tensors()["tensor_id"].iloc[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_cached_answer_belongs_to_the_content(tmp_path: Path, name: str):
    question = next(question for question in QUESTIONS if question.name == name)
    tensor_id = record(tmp_path, 0)
    pin = Pin(question.page, {key: [text] for key, text in question.address.items()} | {"tensor": [tensor_id]})
    with Catalog.open(tmp_path) as catalog:
        catalog.cache = ResultCache(1 << 28, outside=(Catalog,))
        first = answer(pins.draw(catalog, pin))
        assert record(tmp_path, 1) == tensor_id
        catalog.sync()
        second = answer(pins.draw(catalog, pin))
    with Catalog.open(tmp_path) as fresh:
        assert second == answer(View(pin.page, pin.params).draw(fresh)) != first
