"""Colors are a format's own, and can be told apart without red or without green cones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from binade import quant
from binade.app.draw import style

# Machado, Oliveira and Fernandes 2009, table 1, severity 1: linear RGB as seen without red or without green cones.
CONFUSED = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
# Sharma, Wu and Dalal 2005, table 1: two colors in CIE 1976 L*a*b*, and their difference.
PUBLISHED = [
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
    ((50, 0, 0), (50, -1, 2), 2.3669),
    ((50, 2.5, 0), (73, 25, -18), 27.1492),
    ((50, 2.5, 0), (58, 24, 15), 19.4535),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ((6.7747, -0.2908, -2.4247), (5.8714, -0.0985, -2.2286), 0.6377),
]
LOST = [style.BAD, style.CLIPPED]
SOLID = [color for name, color in style.FORMAT_COLORS.items() if name not in style.DASHED]
VARIANTS = [style.FORMAT_COLORS[name] for name in style.DASHED]


def lab(color: str, sight: str) -> np.ndarray:
    """CIE 1976 L*a*b*, as seen in this way."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.array(CONFUSED.get(sight, np.eye(3))) @ np.where(
        rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4
    )
    t = np.array(XYZ) @ linear.clip(0, 1) / [0.95047, 1, 1.08883]
    x, y, z = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000, by the equations of Sharma, Wu and Dalal 2005."""
    chroma = np.mean([np.hypot(*one[1:]), np.hypot(*other[1:])]) ** 7
    stretch = 1.5 - 0.5 * np.sqrt(chroma / (chroma + 25.0**7))
    (l1, a1, b1), (l2, a2, b2) = (values * [1, stretch, 1] for values in (one, other))
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    light, c = (l1 + l2) / 2, (c1 + c2) / 2
    waves = zip((-0.17, 0.24, 0.32, -0.20), (1, 2, 3, 4), (-30, 0, 6, -63), strict=True)
    t = 1 + sum(size * np.cos(np.radians(times * hue + shift)) for size, times, shift in waves)
    s_l = 1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)
    d_l, d_c = (l2 - l1) / s_l, (c2 - c1) / (1 + 0.045 * c)
    d_h = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * c * t)
    rotated = np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2)))) * 2 * np.sqrt(c**7 / (c**7 + 25.0**7))
    return float(np.sqrt(d_l**2 + d_c**2 + d_h**2 - rotated * d_c * d_h))


@pytest.mark.parametrize(("one", "other", "published"), PUBLISHED)
def test_the_difference_is_the_published_one(one, other, published):
    assert difference(np.array(one, float), np.array(other, float)) == pytest.approx(published, abs=5e-5)


@pytest.mark.parametrize("sight", CONFUSED)
@pytest.mark.parametrize(
    "colors", [[*SOLID, *LOST], [*VARIANTS, *LOST], style.PALETTE[:6]], ids=["formats", "variants", "palette"]
)
def test_colors_that_are_drawn_together_differ_for_the_color_blind(colors: list[str], sight: str):
    """Formats, flushed and saturated. Variants of formats differ from the others by their dash."""
    near = {
        (one, other): apart
        for one, other in itertools.combinations(colors, 2)
        if (apart := difference(lab(one, sight), lab(other, sight))) < 8
    }
    assert near == {}


@pytest.mark.parametrize("sight", [*CONFUSED, "all cones"])
def test_the_runs_that_the_app_collects_first_differ_for_all(sight: str):
    recipes = ["mxfp4", "bf16", "FA_mxfp4", "linear_mxfp4", "hifp8", "hifp8_scaled", "mxfp8", "FA_linear_mxfp4"]
    colors = {color for color, _ in style.run_styles([(recipe, None) for recipe in recipes])}
    assert len(colors) == len(recipes)
    trained = colors - {style.FORMAT_COLORS["bf16"]}
    for one, other in itertools.combinations(sorted(trained), 2):
        assert difference(lab(one, sight), lab(other, sight)) >= (8 if sight in CONFUSED else 15), (one, other)


def test_a_format_has_one_color_whatever_it_is_drawn_with():
    for group in quant.FORMATS:
        for others in itertools.permutations(["bf16", "mxfp4", f"linear_{group}", group]):
            drawn = dict(zip(others, style.colors([*others]), strict=True))
            assert drawn[group] == drawn[f"linear_{group}"] == style.FORMAT_COLORS[group]


def test_variants_are_dashed_and_no_lost_value_has_the_color_of_a_format():
    names = [*quant.FORMATS]
    for name, dash in zip(names, style.styles(names)[1], strict=True):
        assert (dash > 0) == (name in style.DASHED)
    assert not set(LOST) & {*style.FORMAT_COLORS.values(), *style.PALETTE}
