"""Tensors and logs at the end of what is possible: operands that a format keeps exactly or cannot hold, steps beyond 32
bits, losses that are not there."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from binade.app.measures.registry import MAP_MEASURES
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from tests.app.planted import operand
from tests.data.builder import make_run
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import command

VALUES = (0.0, -0.0, 1.0, -448.0, 2.0**-140, 3.0e38, float("inf"), float("-inf"), float("nan"))
PLACES = (
    ("map", "map"),
    ("explore", "explore"),
    *(("tensor", part) for part in ("why", "whatif", "codes", "normality")),
)
LOSSES = {
    "empty.csv": "",
    "header.csv": "step,loss\n",
    "short.csv": "step,loss\n1,2.0\n2\n",
    "words.csv": "step,loss\none,2.0\n",
    "empty.jsonl": "\n",
    "other.jsonl": '{"a": 1}\n',
    "null.jsonl": '{"step": null, "loss": null}\n',
    "list.jsonl": "[1, 2]\n",
    "state.json": '{"log_history": []}',
}


def _operand(attempt: Attempt) -> Tensor:
    """Of one value, of few, or of normal values and few."""
    chance = attempt.random
    few = torch.tensor(chance.sample(VALUES, chance.randrange(1, 4)))
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    x = few[torch.randint(len(few), (32, 64), generator=generator)]
    if chance.random() < 0.3:
        x = torch.where(torch.rand(32, 64, generator=generator) < 0.5, torch.randn(32, 64, generator=generator), x)
    return x


@attack("A page answers, or says in words what is missing, whatever values its operands have", tries=60, seconds=120)
def degenerate_operands(attempt: Attempt) -> None:
    chance = attempt.random
    made = [operand(_operand(attempt), layer) for layer in (1, 2)]
    make_run(attempt.place, made, recipe="mxfp4")
    page, part = attempt.choose(PLACES)
    params = {"view": [part], "format": [chance.choice(["mxfp4", "hifp8", "bf16"])]}
    if part == "map":
        params["metric"] = [chance.choice([*MAP_MEASURES])]
    attempt.case = f"{params}: {[x.unique().tolist()[:3] for x, _ in made]}"
    with Catalog.open(attempt.place) as catalog:
        drawn = View(page, params).draw(catalog)
    assert drawn.items or drawn.problems or drawn.verdict
    assert not re.search(r"\b(nan|inf)\b", str(drawn.verdict))  # in words it is NaN and Inf


@attack("Tensors of steps beyond 2³¹ are imported and found by their step", tries=20)
def late_steps(attempt: Attempt) -> None:
    step = attempt.random.choice([2**31 - 1, 2**31, 2**32 + 7, 3 * 10**12])
    attempt.case = str(step)
    logs, root = attempt.place / f"logs/step{step}", attempt.place / "runs"
    logs.mkdir(parents=True)
    torch.save(torch.randn(8, 8), logs / "a.pt")
    status, _, err = command(root, "import", str(logs.parent), "--scores", "", "--workers", "1")
    assert status == 0, err
    with Catalog.open(root) as catalog:
        assert catalog.refused == [] and catalog.tensors()["iteration"].tolist() == [step]


@attack("Losses that are not there are refused in one sentence that says what was expected", tries=18)
def absent_losses(attempt: Attempt) -> None:
    name = attempt.case = attempt.choose(list(LOSSES))
    path, root = attempt.place / name, attempt.place / "runs"
    path.write_text(LOSSES[name])
    status, out, err = command(root, "import", str(path), "--recipe", "bf16")
    assert status in (1, 2), out
    check_sentence((err or out).strip().splitlines()[-1])
    assert "None" not in err and "Traceback" not in err
