"""What a page that compares formats says of their differences."""

from __future__ import annotations

import torch

from binade import fake_quantize
from binade.app.questions.shared.families import about_gradients, about_scales, differences, gradients_of
from binade.collector.recipes.parse import parse_recipe
from binade.quant.metrics import sqnr_db
from binade.quant.specs import Spec


def test_gradients_of_a_family_are_those_of_its_recipe():
    for name in ("mxfp8", "mxfp8(scale=rceil)", "mxfp4", "nvfp4", "hifp8"):
        formats = parse_recipe(f"linear_{name}").linear.formats
        assert gradients_of(Spec.of(name)) == formats["dgrad_grad"]
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    said = about_gradients([Spec.of("mxfp8"), Spec.of("mxfp4")])
    for spec in ("mxfp8", "mxfp8_e5m2"):
        error = (fake_quantize(x, spec).double() - x.double()).square().sum()
        assert f"{sqnr_db(float(x.double().square().sum()), float(error)):.1f} dB" in said
    assert "E4M3" in said and "mxfp4" not in said


def test_scale_rules_are_said_where_they_differ():
    said = about_scales(map(Spec.of, ("mxfp8", "mxfp4", "nvfp4", "hifp8")))
    assert said == "Scale rules: floor (mxfp8 and mxfp4); nvfp4 (nvfp4); none (hifp8)."
    assert not about_scales([Spec.of("mxfp8"), Spec.of("mxfp4")])
    assert "floor (mxfp4); rceil (mxfp4(scale=rceil))" in about_scales(map(Spec.of, ("mxfp4", "mxfp4(scale=rceil)")))
    assert "rounds gradients" not in differences([Spec.of("mxfp8"), Spec.of("nvfp4")], gradients=False)
