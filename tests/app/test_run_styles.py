"""A run has one color and dash, whichever page shows it and whatever is shown beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from binade.app.draw import style
from binade.app.questions.shared.runs import distinct_ends, every_run
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunNotes
from binade.data.run.run_notes import change_notes
from tests.app import roots

Look = tuple[str, tuple[int, ...] | None]


def scales(spec: Any, channel: str) -> Iterator[tuple[str, Any]]:
    """The groups and what they look like in a channel of a chart."""
    for node in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from scales(node, channel)
    if (
        isinstance(spec, dict)
        and isinstance(encoding := spec.get(channel), dict)
        and "domain" in encoding.get("scale", {})
    ):
        yield from zip(encoding["scale"]["domain"], encoding["scale"]["range"], strict=True)


def looks(opened: Catalog, figure: str, view: View) -> dict[str, Look]:
    drawn = view.draw(opened).get(figure)
    assert drawn, view.draw(opened).problems
    colors, dashes = dict(scales(drawn.spec, "color")), dict(scales(drawn.spec, "strokeDash"))
    return {group: (color, tuple(dashes[group])) for group, color in colors.items()}


@pytest.fixture(scope="module")
def opened(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """The collected runs, two of each, with names, one with a color that a user chose."""
    root = roots.copy(collected, tmp_path_factory.mktemp("twice"))
    for run in roots.runs_of(root):
        roots.copy_run(run, run.with_name(f"{run.name}x"))
    for number, run in enumerate(roots.runs_of(root)):
        color = style.FORMAT_COLORS["mxfp4"] if number == 5 else ""
        change_notes(run, RunNotes(f"run {number}", color), RunNotes())
    with Catalog.open(root) as catalog:
        yield catalog


@pytest.mark.thorough
@pytest.mark.slow
def test_the_same_on_every_page_whatever_the_filter(opened: Catalog):
    runs = every_run(opened).set_index("run_id")
    chosen = runs.index[::2].tolist()
    pages = [
        looks(opened, "losses", View("runs")),
        looks(opened, "gaps", View("runs", {"view": ["recipes"]})),
        looks(opened, "gaps", View("runs", {"view": ["recipes"], "run_id": chosen})),
        looks(opened, "histogram", View("explore", {"by": ["run_id"]})),
        looks(opened, "histogram", View("explore", {"by": ["run_id"], "run_id": chosen[1:]})),
        looks(opened, "histogram_panels", View("explore", {"rows": ["operation"], "by": ["run_id"]})),
    ]
    expected = {run["label"]: (run["look"][0], tuple(style.DASHES[run["look"][1]])) for _, run in runs.iterrows()}
    shown = set()
    for page in pages:
        assert len(page) > 1
        assert page == {label: expected[label] for label in page}
        shown |= set(page)
    assert shown == set(expected)


def test_looks_differ_and_a_later_run_changes_none():
    runs: list[tuple[str, str | None]] = [
        ("bf16", None), ("mxfp4", None), ("FA_mxfp4", None), ("linear_mxfp4", None), ("te_block", None),
        ("mxfp8", "#6366f1"), ("mxfp8", None), ("bf16", None), ("nvfp4(block=16x16)", None), ("fc1_only", "#6366f1"),
    ]  # fmt: skip
    found = style.run_styles(runs)
    assert len(set(found)) == len(runs)
    assert len({color for color, _ in found}) == len(runs) - 2  # bf16 and the chosen color are there twice
    for (rounded, chosen), (color, _) in zip(runs, found, strict=True):
        assert color == chosen or chosen is None
        assert (color == style.FORMAT_COLORS["bf16"]) == (rounded == "bf16")
    assert found[1][0] == style.FORMAT_COLORS["mxfp4"] and found[6][0] == style.FORMAT_COLORS["mxfp8"]
    assert style.run_styles([*runs, ("mxfp4", None)])[:-1] == found
    many = style.run_styles([(f"recipe{number}", None) for number in range(len(style.PALETTE))])
    assert len({color for color, _ in many}) == len(many)


def test_colors_that_are_hard_to_tell_apart_have_other_dashes():
    (first, one), (second, other) = style.run_styles([("mxfp8", None), ("x", "#2471f0")])
    assert first != second and one != other


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (["llama_sweep_lr1e-3_mxfp4", "llama_sweep_lr1e-3_mxfp8"], ["…mxfp4", "…mxfp8"]),
        (["llama_sweep_lr1e-3", "llama_sweep_lr1e-4"], ["…lr1e-3", "…lr1e-4"]),
        (["mxfp4 · seed 1", "mxfp4 · seed 2"], ["mxfp4 · seed 1", "mxfp4 · seed 2"]),
        (["llama_sweep_run_a", "bf16"], ["llama_sweep_run_a", "bf16"]),
        (["mxfp4", "mxfp8"], ["mxfp4", "mxfp8"]),
        (["llama_sweep_lr1e-3_mxfp4"], ["llama_sweep_lr1e-3_mxfp4"]),
    ],
)
def test_a_list_of_runs_leaves_out_a_long_beginning_that_all_share(labels: list[str], shown: list[str]):
    assert distinct_ends(labels) == shown
