"""TrainerCallback, for the Trainer of Hugging Face transformers, which only this module imports."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback as HuggingFaceCallback

from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.recipes.recipe import Recipe

IGNORED = -100  # the label of a token that is not in the loss


class TrainerCallback(HuggingFaceCallback):  # type: ignore[misc]  # transformers' types are not read
    """Instruments the model of a transformers.Trainer while it trains.

        with Recorder(label="mine", iterations=2) as recorder:
            Trainer(model, ..., callbacks=[TrainerCallback("mxfp8", recorder)]).train()

    recipe, recorder, options   as `instrument` takes them

    Changes in the loss are predicted for models that return logits and are given labels, as `Recorder.sensitivity` does
    it: they do not depend on how many micro-batches are accumulated.

    The iteration is the Trainer's global_step, also after it resumed from a checkpoint. The losses that the Trainer
    logs become the run's: with logging_steps=10, each is the mean of ten iterations, and is compared with such means.
    The model is instrumented after accelerate has prepared it, until training ends. If training raises an exception,
    the model stays instrumented until the next training begins or `close` is called.
    """

    def __init__(self, recipe: Recipe | str | None = None, recorder: Recorder | None = None, **options: Any) -> None:
        self.recipe, self.recorder, self.options = recipe, recorder, options
        self._instrumented = ExitStack()
        self._logged = 0  # the global step of the last loss that was logged, or of the start

    def close(self) -> None:
        """Restore the model."""
        self._instrumented.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()
        self._instrumented.enter_context(instrument(given["model"], self.recipe, self.recorder, **self.options))
        if self.recorder:
            self._instrumented.callback(given["model"].register_forward_hook(self._passed, with_kwargs=True).remove)
            self.recorder.go_to(state.global_step)
        self._logged = state.global_step

    def _passed(self, model: nn.Module, args: Any, given: dict[str, Any], result: Any) -> None:
        logits, labels = getattr(result, "logits", None), given.get("labels")
        if not (self.recorder and model.training and isinstance(logits, Tensor) and isinstance(labels, Tensor)):
            return
        if labels.shape == logits.shape[:2]:  # of a causal model: each token predicts the next
            valid = torch.zeros_like(labels, dtype=torch.bool)
            valid[:, :-1] = labels[:, 1:] != IGNORED
            self.recorder.sensitivity(logits, valid)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.recorder:
            self.recorder.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self.recorder and logs and "loss" in logs:
            window = max(1, state.global_step - self._logged)
            self.recorder.log(loss=logs["loss"], grad_norm=logs.get("grad_norm"), window=window)
            self._logged = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()
