"""Addresses that make the server compute much: what takes more time or memory than one answer may is refused before it
is computed."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from binade.app.view.budget import BYTES
from binade.app.view.view import View
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from tests.app.planted import operand
from tests.data.builder import make_run
from tests.siege.attack import Attempt, attack, check_sentence

LARGE, MANY = 1 << 10, 12  # tensors of LARGE x LARGE values
LONG = [f"mxfp4(block=1x{size})" for size in range(2, 42)]
HEAVY = {
    "a block longer than its axis": ("tensor", {"format": ["mxfp4(block=1x3000000)"]}),
    "a longer block for the Map": ("map", {"format": ["mxfp4(block=1x3000000)"]}),
    "forty formats": ("tensor", {"view": ["whatif"], "formats": LONG}),
    "a tall tile": ("tensor", {"format": ["fp8_e4m3(block=3000000x1)"]}),
    "a tall tile among formats": ("tensor", {"view": ["whatif"], "formats": ["fp8_e4m3(block=3000000x1)"]}),
    "a tall tile for the Map": ("map", {"format": ["fp8_e4m3(block=3000000x1)"]}),
    "a tall tile to compare with": ("map", {"format": ["mxfp4"], "versus": ["fp8_e4m3(block=3000000x1)"]}),
    "tiles with rotations": ("map", {"format": ["nvfp4(block=32x32, hadamard=32)"]}),
    "many large tensors": ("map", {"format": ["nvfp4(block=8)"]}),
    "many large tensors, compared": ("map", {"format": ["nvfp4(block=8)"], "versus": ["nvfp4(block=4)"]}),
    "a long text": ("map", {"format": ["mxfp4" + " " * 300_000]}),
    "many words": ("tensor", {"formats": ["mxfp4 " * 100_000]}),
    "many values": ("map", {"iteration": [str(number) for number in range(300_000)]}),
}


def make_large(root: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LARGE, LARGE, generator=generator)
    make_run(root, [operand(x * layer, layer) for layer in range(1, MANY + 1)], recipe="mxfp4")


def _draw(root: str, page: str, params: dict[str, list[str]], answer: Connection) -> None:
    torch.set_num_threads(1)
    with Catalog.open(root) as opened:
        opened.cache = ResultCache(1 << 26, outside=(Catalog, threading.Thread))
        View("map").draw(opened)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        problems = View(page, params).draw(opened).problems
        answer.send((problems, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10))


@attack("An address is answered or refused in one sentence within a minute and a gigabyte", tries=26, seconds=200)
def heavy_addresses(attempt: Attempt) -> None:
    attempt.case = attempt.choose(list(HEAVY))
    page, params = HEAVY[attempt.case]
    root = attempt.once("large", make_large)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_draw, args=(str(root), page, params, there))
    process.start()
    try:
        there.close()
        problems, nbytes = here.recv() if here.poll(60) else ((), None)
    finally:
        process.kill()
        process.join()
    assert nbytes is not None, "no answer within a minute"
    assert nbytes <= BYTES, f"{nbytes / 1e9:.1f} GB"
    for problem in problems:
        check_sentence(problem)
