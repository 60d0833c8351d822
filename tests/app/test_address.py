"""The address says what is shown, so that it shows the same later; the session that opened it follows new runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from streamlit.testing.v1 import AppTest

from binade.app.frame import state
from binade.app.frame.address import RESOLVED
from binade.app.view.params import texts_of
from tests.app.planted import operand
from tests.app.test_pages import rerun
from tests.data.builder import make_run

Visit = Callable[..., AppTest]
SCOPE = {"map": ("format", "run_id", "iteration"), "why": ("format", "tensor")}


def record(root: Path, seed: int, last: int) -> str:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    made = [operand(x * (1 + at), layer, at, tensor_name="input") for at in range(last + 1) for layer in (1, 2)]
    return make_run(root, made, recipe="mxfp4", seed=seed).run_id


def address(at: AppTest) -> dict[str, list[str]]:
    return {name: texts_of(texts) for name, texts in at.query_params.items()}


def left_open(at: AppTest) -> list[str]:
    """The parameters that the view leaves open."""
    return address(at).get(RESOLVED, [""])[0].split(",")


@pytest.mark.parametrize("page", SCOPE)
def test_an_address_asked_twice_shows_the_same_while_runs_come_in(visit: Visit, tmp_path: Path, page: str):
    first = record(tmp_path, 0, 1)
    at = visit(tmp_path, page)
    written = address(at)
    assert set(SCOPE[page]) <= set(written) and set(left_open(at)) <= set(written)
    newer = record(tmp_path, 1, 2)
    state._open(str(tmp_path)).opened.sync()
    again = visit(tmp_path, page, **written)
    assert not again.exception
    assert {name: texts for name, texts in address(again).items() if name in SCOPE[page]} == {
        name: written[name] for name in SCOPE[page]
    }
    assert "run_id" not in left_open(again)
    assert first in str(written) and newer not in str(address(again))
    # The session that was open follows.
    assert newer in str(address(rerun(at)))


def test_what_is_chosen_is_not_left_open(visit: Visit, tmp_path: Path):
    run = record(tmp_path, 0, 3)
    at = visit(tmp_path, "map", iteration="1")
    assert address(at)["iteration"] == ["1"] and address(at)["run_id"] == [run]
    assert "iteration" not in left_open(at)
    at.selectbox(key="filter_scope_iteration").select(2)
    assert address(rerun(at))["iteration"] == ["2"]
