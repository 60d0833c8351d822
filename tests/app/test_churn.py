"""Runs that are deleted and added while something is drawn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from binade.app.questions.explore.question import EXPLORE
from binade.data.index.catalog import Catalog
from binade.data.index.opened import OutdatedError
from tests.app.planted import drawn, layers_alike


def test_a_drawing_begins_again_when_the_files_of_its_runs_are_gone(tmp_path: Path) -> None:
    layers_alike(tmp_path, 1, layers=2)
    (first,) = tmp_path.glob("*_made_*")
    with Catalog.open(tmp_path) as opened:
        layers_alike(tmp_path, 2, layers=3)
        shutil.rmtree(first)
        table = drawn(EXPLORE, opened, by="quant_type").tables["Statistics"]
        assert table["tensors"].tolist() == [6]
        (second,) = opened.runs()["run_id"]
        with pytest.raises(OutdatedError), opened.snapshot():  # its owner begins again
            assert opened.totals().tensors == 6
            shutil.rmtree(tmp_path / second)
            drawn(EXPLORE, opened, by="tensor_name")
