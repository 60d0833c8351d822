"""What formats that are compared differ in besides their values: what a recipe of the same name gives to gradients, and
how the scales are chosen."""

from __future__ import annotations

from collections.abc import Iterable

from binade.collector.recipes.parse import GRADIENT_FORMAT
from binade.data.compare.evidence import listed
from binade.data.words.text import number_text
from binade.quant.normal import normal_sqnr
from binade.quant.specs import Spec


def gradients_of(spec: Spec) -> Spec:
    """The spec that a recipe with this one rounds gradients to."""
    return Spec.of(GRADIENT_FORMAT.get(spec.format.name, spec), **spec.options())


def about_gradients(specs: Iterable[Spec]) -> str:
    """Which of these a recipe gives to gradients in another element, with what both do to normal values; "" for
    none."""
    texts = []
    for spec in specs:
        other = gradients_of(spec)
        if other != spec:
            here, there = (number_text(normal_sqnr(str(one)), ".1f") for one in (spec, other))
            texts.append(
                f"The recipe {spec} rounds gradients to {other} (normal values: {there} dB); {spec} here is "
                f"{spec.format.element.name.upper()} for all operands ({here} dB)."
            )
    return " ".join(texts)


def about_scales(specs: Iterable[Spec]) -> str:
    """The scale rule of each of these, where they differ; else ""."""
    by_rule: dict[str, list[str]] = {}
    for spec in specs:
        by_rule.setdefault(spec.scale, []).append(str(spec))
    if len(by_rule) < 2:
        return ""
    return "Scale rules: " + "; ".join(f"{rule} ({listed(names)})" for rule, names in by_rule.items()) + "."


def differences(specs: Iterable[Spec], gradients: bool = True) -> str:
    """Both. gradients: whether a gradient is among the operands."""
    specs = list(dict.fromkeys(specs))
    return " ".join(filter(None, (about_gradients(specs) if gradients else "", about_scales(specs))))
