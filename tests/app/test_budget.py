"""What an address may make the server compute: sizes of texts, time and memory, and whose turn it is."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

import pytest
import torch

from binade.app.frame import palette
from binade.app.frame.fair_queue import SESSION, FairQueue
from binade.app.questions.map.question import MAP
from binade.app.view.budget import SCORE, BudgetError, RoundingCost, check
from binade.app.view.params import LONGEST, MOST_FORMATS, MOST_WORDS
from binade.app.view.view import QUICK, SLOW, View, pool_of
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from binade.quant.blocks import look
from binade.quant.specs import Spec


@pytest.mark.parametrize("shape", [(64, 96), (3, 5, 70), (7,), ()], ids=str)
@pytest.mark.parametrize(
    "spec", ["mxfp4", "fp8_e4m3(block=300x40)", "mxfp4(block=1x9999)", "fp8_e4m3(block=row)", "bf16"]
)
def test_values_are_those_that_are_rounded(spec: str, shape: tuple[int, ...]) -> None:
    blocks = look(torch.ones(shape), spec).x
    expected = blocks.numel()
    estimated = RoundingCost(Spec.of(spec), shape, -1).values
    assert estimated == expected


def test_a_refusal_says_what_to_reduce() -> None:
    tall = RoundingCost(Spec.of("fp8_e4m3", block="300000x1"), (1024, 1024), -1)
    with pytest.raises(BudgetError, match="choose a block that fits into 1024 x 1024, unlike 300000x1") as refused:
        check([tall])
    assert "\n" not in str(refused.value)
    plain = RoundingCost(Spec.of("mxfp4"), (1 << 10, 1 << 10), -1)
    other = RoundingCost(Spec.of("mxfp8"), (1 << 10, 1 << 10), -1)
    with pytest.raises(BudgetError, match="choose fewer formats or narrow the filter"):
        check([plain, other] * 100)
    check([plain, other] * (MOST_FORMATS // 2) * 2)  # what a page may ask for
    with pytest.raises(BudgetError):
        check([RoundingCost(Spec.of("mxfp4", hadamard=16), (1 << 14, 1 << 14), -1)], SCORE)


@pytest.mark.thorough
def test_nothing_is_computed_beyond_the_budget(catalog: Catalog) -> None:
    tracemalloc.start()
    for page, params in (
        ("tensor", {"format": ["fp8_e4m3(block=99999999x1)"]}),
        ("tensor", {"view": ["whatif"], "formats": ["fp8_e4m3(block=99999999x1)"]}),
        ("map", {"format": ["fp8_e4m3(block=99999999x1)"]}),
    ):
        drawn = View(page, params).draw(catalog)
        assert not drawn.figures and any("Not computed: rounding" in problem for problem in drawn.problems), drawn
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 28


def test_texts_and_formats_are_bounded(catalog: Catalog) -> None:
    many = [f"mxfp4(block=1x{size})" for size in range(2, 42)]
    reading = View("tensor", {"view": ["whatif"], "formats": many}).read(catalog)
    assert reading.values["formats"] == many[:MOST_FORMATS]
    assert (
        f"The URL asks for 40 values of formats: the first {MOST_FORMATS} are read. Choose fewer." in reading.problems
    )
    long = "mxfp4" + " " * 300_000
    for name in ("format", "versus", "view", "module"):
        reading = View("map", {name: [long]}).read(catalog)
        assert any("longer than" in problem for problem in reading.problems), name


def test_a_long_search_is_refused(catalog: Catalog) -> None:
    for text in ("x" * (LONGEST + 1), "fc1 " * (MOST_WORDS + 1), "a " * 150_000):
        (entry,) = palette.find(catalog, View("map"), text)
        assert entry.title == f"The search is longer than {LONGEST} characters or {MOST_WORDS} words: shorten it."
    assert palette.find(catalog, View("map"), "fc1 " * MOST_WORDS)[0].kind != "limit"


def _submit(queue: FairQueue, session: str, *task: Any) -> Future[Any]:
    context = copy_context()
    context.run(SESSION.set, session)
    return context.run(queue.submit, *task)


def test_sessions_take_turns() -> None:
    queue, gate, order = FairQueue(1, "test"), threading.Event(), []

    def task(name: str) -> None:
        gate.wait(60)
        order.append(name)

    tasks = [_submit(queue, name[0], task, name) for name in ("a0", "a1", "a2", "a3", "b0", "c0", "b1")]
    gate.set()
    for each in tasks:
        each.result(60)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_a_session_has_one_task_at_a_time() -> None:
    """Another session's task ends while the first one's still runs, and the first one's second has not begun."""
    queue, gate, begun = FairQueue(2, "test"), threading.Event(), []

    def task(name: str, waits: bool) -> None:
        begun.append(name)
        if waits:
            gate.wait(60)

    tasks = [_submit(queue, "a", task, f"a{number}", True) for number in range(3)]
    for number in range(3):
        _submit(queue, "b", task, f"b{number}", False).result(60)
    assert begun == ["a0", "b0", "b1", "b2"]
    gate.set()
    for each in tasks:
        each.result(60)
    assert begun[4:] == ["a1", "a2"]


def test_a_cancelled_task_is_not_begun() -> None:
    queue, gate, begun = FairQueue(1, "test"), threading.Event(), []
    first = queue.submit(gate.wait, 60)
    second, third = queue.submit(begun.append, 2), queue.submit(begun.append, 3)
    assert second.cancel()
    gate.set()
    third.result(60)
    assert first.result(60) and begun == [3] and second.cancelled()


def test_a_task_that_nobody_waits_for_is_not_begun() -> None:
    """Its reader has left the page before its turn; that of another session is computed."""
    queue, gate, begun, cache = FairQueue(1, "test"), threading.Event(), [], ResultCache(1 << 20)
    queue.submit(gate.wait, 60)

    def leave(count: int, of: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        cache.get(None, "a", lambda done: begun.append("a"), queue, leave)
    waiting = _submit(queue, "b", begun.append, "b")
    gate.set()
    waiting.result(60)
    assert begun == ["b"]
    assert cache.get(None, "a", lambda done: "again", queue) == "again"


def test_a_map_is_computed_in_the_queue_only_if_it_rounds_tensors(catalog: Catalog) -> None:
    for params, pool in (
        ({"format": ["mxfp4"]}, QUICK),
        ({"format": ["nvfp4(block=8)"]}, SLOW),
        ({"format": ["nvfp4(block=8)"], "metric": ["absmax"]}, QUICK),
        ({"format": ["mxfp4"], "versus": ["nvfp4(block=8)"]}, SLOW),
        ({"format": ["mxfp4"], "versus": [str(catalog.runs()["run_id"][0])]}, QUICK),
    ):
        reading = View("map", params).read(catalog)
        assert pool_of(catalog, MAP, reading.where, reading.values) is pool, params


def test_a_failed_task_frees_its_place() -> None:
    queue = FairQueue(1, "test")
    failed = queue.submit(lambda: 1 / 0)
    assert isinstance(failed.exception(60), ZeroDivisionError)
    assert queue.submit(lambda: 3).result(60) == 3
