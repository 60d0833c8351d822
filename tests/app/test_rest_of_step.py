"""The app over a run that recorded what a step computes besides its products, and none of those."""

from __future__ import annotations

from pathlib import Path

import pytest

from binade.app.pages.registry import PAGES
from binade.app.view.view import View
from binade.cli import main
from binade.collector.jobs.estimate import volume_of
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import Other, tensor_names
from binade.data.words.filter import Filter
from tests.app.test_pages import Visit

pytestmark = pytest.mark.slow
# Those of AdamW's steps.
NAMES = tuple(name for place in Other if place is not Other.NEWTON_SCHULZ for name in tensor_names(place))
MODULES = ("input_layernorm", "head", "router", "q", "final_layernorm")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rest")
    size = "--model deepseek2_lite --sequence-length 16 --control-iter 2 --scores mxfp8,nvfp4 --backend torch"
    chosen = f"--tensors {','.join(NAMES)} --modules {','.join(MODULES)}"
    assert main(f"run {size} {chosen} --tensor-save-dir {root}".split()) == 0
    return root


def test_all_of_them_are_estimated_chosen_and_ranked(root: Path):
    config = RunConfig(model="deepseek2_lite", sequence_length=16, control_iter=2, tensors=NAMES, modules=MODULES)
    with Catalog.open(root) as catalog:
        found = catalog.totals()
        volume = volume_of(plan(config))
        assert (volume.tensors, volume.values) == (found.tensors, found.elements)
        assert set(catalog.facets()["tensor_name"]) == set(NAMES)
        assert set(catalog.facets()["operation"]) == {"forward", "backward", "optimizer"}
        measured = catalog.tensors().dropna(subset=["absmax", "kurtosis"])
        assert set(measured["tensor_name"]) == set(NAMES)
        assert "exp_avg_sq" in set(catalog.errors("mxfp8", ("tensor_name",))["tensor_name"])


PARTS = [(page, view) for page in ("map", "explore", "runs") for view in PAGES[page].parts if view != "collect"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("page", "view"), PARTS)
def test_pages(visit: Visit, root: Path, page: str, view: str):
    at = visit(root, page, view=view, operation="optimizer")
    assert not at.error and at.markdown


@pytest.mark.parametrize("metric", ["absmax", "sqnr_db"])
def test_the_map_of_an_optimizers_state(root: Path, metric: str):
    view = View("map", {"metric": [metric], "format": ["mxfp8"], "operation": ["optimizer"]})
    with Catalog.open(root) as catalog:
        drawn = view.draw(catalog)
    assert set(drawn.get("map").table["tensor"]) >= {"exp_avg_sq"}
    words = "absmax" if metric == "absmax" else " dB"
    assert words in drawn.verdict, drawn.verdict


@pytest.mark.sampled(1)
@pytest.mark.parametrize("view", PAGES["tensor"].parts)
def test_tensor(root: Path, view: str):
    with Catalog.open(root) as catalog:
        for name in ("exp_avg_sq", "router_load"):
            chosen = catalog.tensors(Filter(tensor_name=(name,)))["tensor_id"].iloc[0]
            drawn = View("tensor", {"view": [view], "tensor": [chosen]}).draw(catalog)
            assert drawn.figures or drawn.problems, name
