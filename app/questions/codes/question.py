"""Which codes does the format use? Its codes, their precision, and their entropy."""

from __future__ import annotations

from typing import Any

from binade.app.draw.figure import Drawn, Figure
from binade.app.questions.codes import charts, compute
from binade.app.questions.question import AS_OPERAND, Question
from binade.app.questions.shared.rounded import about_format
from binade.app.questions.shared.selection import Of, SelectedTensor
from binade.data.compare.evidence import SHARE, Measure, exact, say
from binade.data.words.text import counted
from binade.quant.blocks import DENORMAL, ZERO
from binade.quant.metrics import METRICS

ENTROPY = Measure("code_entropy_bits", "Code entropy", format=".2f")


def draw(selected: SelectedTensor, values: dict[str, Any]) -> Drawn:
    if selected.problem:
        return Drawn(problems=(selected.problem,))
    subject = selected.rounded()
    table = compute.codes(subject)
    if not table["count"].sum():
        return Drawn(problems=("There are no codes: no value is finite, or the tensor is empty.",))
    element = selected.spec.format.element
    used, entropy = int((table["count"] > 0).sum()), compute.entropy_bits(table)
    share = table.groupby("tier")["share"].sum()
    flushed = compute.flushed(subject)
    shares = {"already": share.get(ZERO, 0) - flushed, "flushed": flushed, "denormal": share.get(DENORMAL, 0)}
    verdict = say(
        "{used} of {codes} codes are used; their entropy is {entropy} of {bits} bits. {already} of {values} were zero "
        "already, {flushed} are flushed to zero, and {denormal} get a denormal code.",
        used=used, codes=1 << element.bits, entropy=exact(ENTROPY, entropy), bits=element.bits,
        values=selected.all_values, **{name: exact(SHARE, max(value, 0.0)) for name, value in shares.items()},
    )  # fmt: skip
    caption = (
        f"{selected.source(subject.note or 'exact')}\n{about_format(selected.spec)}. "
        f"{METRICS['code_entropy_bits'].label}: {METRICS['code_entropy_bits'].definition}."
    )
    number = counted(int(table["count"].sum()), "value") + (f" · {subject.note}" if subject.note else "")
    note = f"{about_format(selected.spec)}. Codes that never occur have no bar."
    bars = Figure(
        "codes",
        charts.codes(table, selected.spec, number),
        table,
        caption,
        note=note,
        height=400,
        group="codes",
        width=3,
    )
    tiers = compute.tiers(table, flushed)
    chart = charts.tiers(tiers, f"{number} · codes used, of all codes")
    parts = Figure("tiers", chart, tiers, caption, height=120 + 40 * len(tiers), group="codes", width=2)
    return Drawn((bars, parts), verdict)


CODES = Question(
    text="Which codes does the format use?",
    title="Codes",
    icon=":material/tag:",
    help="Codes, their precision and their entropy",
    page="tensor",
    of=Of.TENSOR,
    takes=AS_OPERAND,
    view="codes",
    room="why",
    draw=draw,
    of_values=True,
)
