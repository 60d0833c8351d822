"""Numbers in charts, written as `data.words.text.number_text` writes them, in Vega's expressions. No Altair here.

`label` goes through a Vega-Lite specification once: axes and legends of numbers get their labels, and the numbers of
tooltips and texts that no format fixes become texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
# Formats of d3 that write large or small numbers in another way: none, with an exponent, or with a prefix of SI.
_OTHER = re.compile(r"[+,]?(\.\d+)?~?[egrs]?")
_PARTS = ("hconcat", "vconcat", "concat", "layer")


def _digit(number: str, place: int) -> str:
    at = f"floor(abs({number}) / {place}) % 10"
    return f"slice('{_DIGITS}', {at}, {at} + 1)"


def _superscript(number: str) -> str:
    """⁻¹² for -12; of at most three digits."""
    return (
        f"(({number}) < 0 ? '⁻' : '') + (abs({number}) >= 100 ? {_digit(number, 100)} : '')"
        f" + (abs({number}) >= 10 ? {_digit(number, 10)} : '') + {_digit(number, 1)}"
    )


POWERS_OF_TWO = f"'2' + {_superscript('datum.value')}"
"""The labels of an axis of log₂: 2⁻¹²."""


def _power(value: str, mantissa: str) -> str:
    """3.0·10⁴. mantissa: the format of d3 that writes it, and an e."""
    parts = f"split(format({value}, '{mantissa}'), 'e')"
    return f"{parts}[0] + '·10' + {_superscript(f'toNumber({parts}[1])')}"


def expression(value: str, sign: str = "", digits: int = 3, whole: bool = False) -> str:
    """What `data.words.text.number_text` writes for a value, an expression, with significant digits.

    sign   "+" to mark positive values
    whole  write whole numbers with all of their digits
    """
    low, high = 1e-3 - 5 * 10.0 ** (-4 - digits), 1e4 - 5 * 10.0 ** (3 - digits)
    fits = f"{value} == 0 || (abs({value}) >= {low!r} && abs({value}) < {high!r})"
    plain, zero = f"format({value}, '{sign},.{digits}~r')", f"{value} == 0 ? '0'"
    zero += f" : {value} == floor({value}) ? format({value}, '{sign},d')" * whole
    shown = f"{zero} : {fits} ? {plain} : {_power(value, f'{sign}.1e')}"
    return f"!isValid({value}) ? '–' : !isFinite({value}) ? ({value} < 0 ? '−∞' : '∞') : {shown}"


# The labels of an axis, by the type of its scale. An axis that ends at 0.00002 shows 2·10⁻⁵. Of a logarithmic one, some
# ticks have no label.
_TICK = _power("datum.value", "~e")
AXES = {
    "linear": "datum.value == 0 ? '0' : max(abs(domain('{0}')[0]), abs(domain('{0}')[1])) < 1e-2"
    f" || max(abs(domain('{{0}}')[0]), abs(domain('{{0}}')[1])) >= 1e4 ? {_TICK} : datum.label",
    "log": "datum.label == '' ? '' : abs(datum.value) >= 9e-4 && abs(datum.value) < 9999 ? format(datum.value, ',~r')"
    f" : replace({_TICK}, regexp('^1·'), '')",
}


def label(spec: Any, layered: bool = False) -> None:
    """Write the numbers of a specification in one way. Labels, texts and formats that the chart defines stay, unless
    the format is one that writes large or small numbers in another way. layered: it is a layer, whose axes are those of
    its chart."""
    if isinstance(spec, list):
        for chart in spec:
            label(chart, layered)
    elif isinstance(spec, dict):
        for channel in ("x", "y") if not layered else ():
            _label_axis(spec, channel)
        _label_marks(spec, spec.get("encoding", {}))
        for part in (*_PARTS, "spec"):
            label(spec.get(part, []), layered=part == "layer")


def encodings(spec: dict[str, Any], channel: str) -> Iterator[dict[str, Any]]:
    """The encodings of a channel in a chart and its layers."""
    if channel in spec.get("encoding", {}):
        yield spec["encoding"][channel]
    for layer in spec.get("layer", []):
        yield from encodings(layer, channel)


def _label_axis(spec: dict[str, Any], channel: str) -> None:
    """Label an axis of numbers, unless a layer defines its labels. Layers share it, and only one of them may name the
    type of its scale."""
    every = list(encodings(spec, channel))
    axes = [encoding for encoding in every if encoding.get("axis", {}) is not None]
    types = [(encoding.get("scale") or {}).get("type") for encoding in every]
    shared = next(filter(None, types), "linear")
    for encoding in axes:
        axis = encoding.get("axis", {})
        if axis.get("format") == "d" or (axis.get("tickMinStep") == 1 and {"format", "labelExpr"}.isdisjoint(axis)):
            encoding["axis"] = axis | {"format": ",d"}
    if not all({"format", "labelExpr", "labels"}.isdisjoint(encoding.get("axis", {})) for encoding in axes):
        return
    for encoding in axes:
        labels = AXES.get((encoding.get("scale") or {}).get("type", shared))
        if encoding.get("type") == "quantitative" and labels:
            encoding["axis"] = encoding.get("axis", {}) | {"labelExpr": labels.format(channel)}


def _label_marks(spec: dict[str, Any], encoding: dict[str, Any]) -> None:
    """The legend of a color, and the texts and tooltips of a chart's or a layer's marks."""
    color = encoding.get("color", {})
    legend = color.get("legend", {})
    if color.get("type") == "quantitative" and legend is not None and {"format", "labelExpr"}.isdisjoint(legend):
        color["legend"] = legend | {"labelExpr": expression("datum.value")}
    shown = encoding.get("tooltip", [])
    texts = [*(shown if isinstance(shown, list) else [shown]), encoding.get("text", {})]
    for definition in texts:
        form = str(definition.get("format", ""))
        if definition.get("type") != "quantitative" or "field" not in definition or not _OTHER.fullmatch(form):
            continue
        if {"aggregate", "bin"} & definition.keys() or form == ",":
            continue
        name = f"{definition['field']} as text {form}".strip()
        text = expression(f"datum[{definition['field']!r}]", "+" * form.startswith("+"), whole=not form)
        calculated = {"calculate": text, "as": name}
        if calculated not in spec.setdefault("transform", []):
            spec["transform"] = [*spec["transform"], calculated]
        # Without a format, Vega-Lite looks for the text of the mark that is nearest to the pointer in the wrong place.
        definition |= {"field": name, "type": "nominal", "format": ""}
