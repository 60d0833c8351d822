"""`instrument` on the models of collector: it restores them, nests, and refuses what it cannot intercept."""

from __future__ import annotations

import pytest
import torch

from binade import quant
from binade.collector import instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.attention import CoreAttention
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.collector.recipes.selection import SelectionError
from tests.collector.small_model import SHAPE, batch, build, step


class TestInstrument:
    def begins(self, model: GPTModel) -> list[int]:
        return [id(m.begin) for m in model.modules() if isinstance(m, (ParallelLinear, CoreAttention))]

    def test_puts_the_model_back(self):
        model = build()
        before, logits = self.begins(model), step(model)
        with instrument(model, "mxfp4"):
            assert not set(self.begins(model)) & set(before)
            assert not torch.equal(step(model), logits)
        assert self.begins(model) == before
        assert torch.equal(step(model), logits)

    def test_puts_the_model_back_after_an_exception(self):
        model = build()
        before = self.begins(model)
        with pytest.raises(ZeroDivisionError), instrument(model, "mxfp4"):
            raise ZeroDivisionError
        with pytest.raises(KeyboardInterrupt), instrument(model, "mxfp4"):
            raise KeyboardInterrupt
        assert self.begins(model) == before

    def test_can_be_nested(self):
        model = build()
        with instrument(model, "hifp8"):
            outer, logits = self.begins(model), step(model)
            with instrument(model, "bf16"):
                assert not torch.equal(step(model), logits)
            assert self.begins(model) == outer and torch.equal(step(model), logits)

    def test_blocks_left_in_another_order_are_refused(self):
        model = build()
        outer, inner = instrument(model, "hifp8"), instrument(model, "mxfp4")
        outer.__enter__(), inner.__enter__()
        with pytest.raises(InstrumentError, match="again in the meantime: exit the later `with` block first"):
            outer.__exit__(None, None, None)

    def test_what_a_model_of_ours_has_beside_its_own_layers_is_not_left_out(self):
        class Extended(GPTModel):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                self.extra = torch.nn.Linear(8, 8)

            def forward(self, tokens):
                return super().forward(tokens) + self.extra(torch.ones(2, 8)).sum()

        torch.manual_seed(0)
        model, plain = Extended(SHAPE), build()
        model.load_state_dict(plain.state_dict(), strict=False)
        tokens = batch()[0]
        with instrument(model, "linear_mxfp4", backend="torch"), instrument(plain, "linear_mxfp4", backend="torch"):
            added = model(tokens) - plain(tokens)
        weight, bias = model.extra.weight, model.extra.bias
        expected = torch.ones(2, 8) @ quant.fake_quantize(weight, "mxfp4").t() + bias  # 1 is a code of mxfp4
        assert torch.allclose(added, expected.sum().expand_as(added), atol=1e-5)
        assert not torch.allclose(added, (torch.ones(2, 8) @ weight.t() + bias).sum().expand_as(added), atol=1e-3)
        model.attention = torch.nn.MultiheadAttention(8, 1)
        with pytest.raises(InstrumentError, match=r"attention \(MultiheadAttention\) cannot be intercepted"):
            instrument(model, "mxfp4").__enter__()
        with pytest.raises(InstrumentError, match="the LM head of collector's own models stays in bf16"):
            instrument(plain, "mxfp4", head=True).__enter__()

    def test_unknown_recipes_and_layers_are_refused(self):
        model = build()
        before = self.begins(model)
        with pytest.raises(ValueError, match="unknown recipe 'nope'"), instrument(model, "nope"):
            pass
        for layers in ({"skip": "3"}, {"capture": "router"}):
            with pytest.raises(SelectionError, match="the model, which has layers 1 to 2"):
                with instrument(model, "mxfp8", **layers):
                    pass
        assert self.begins(model) == before
