"""TrainerCallback, for the Trainer of Hugging Face transformers, which only this module imports."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback as HuggingFaceCallback
from transformers.trainer_callback import ExportableState

from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import Recipe


class TrainerCallback(HuggingFaceCallback, ExportableState):  # type: ignore[misc]  # transformers' types are not read
    """Instruments the model of a transformers.Trainer while it trains.

        with Recorder(label="mine", iterations=2) as recorder:
            Trainer(model, ..., callbacks=[TrainerCallback("mxfp8", recorder)]).train()

    recipe, recorder, options   as `instrument` takes them
    held_out        batches that the model does not train on: dictionaries with input_ids and, where they differ, labels
    evaluate_every  evaluate them every so many global steps, before the first and after the last, see
                    `Recorder.evaluate`; 0 for never

    The iteration is the Trainer's global_step, also after it resumed from a checkpoint. Checkpoints have the hashes of
    what was read, so a training that resumes from one is compared like one that was never interrupted. The losses that
    the Trainer logs become the run's: with logging_steps=10, each is the mean of ten iterations, and is compared with
    such means. The model is instrumented after accelerate has prepared it, until training ends. If training
    raises an exception, the model stays instrumented until the next training begins or `close` is called.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        recorder: Recorder | None = None,
        *,
        held_out: Sequence[Any] = (),
        evaluate_every: int = 0,
        **options: Any,
    ) -> None:
        if bool(held_out) != bool(evaluate_every) or evaluate_every < 0:
            raise ConfigError(
                f"evaluate_every is {evaluate_every} with {len(held_out)} held-out batches: give both, such as "
                "held_out=batches, evaluate_every=100"
            )
        if held_out and not recorder:
            raise ConfigError("held-out losses are kept by a Recorder: give one, or leave out held_out")
        self.recipe, self.recorder, self.options = recipe, recorder, options
        self.held_out, self.evaluate_every = held_out, evaluate_every
        self._instrumented = ExitStack()
        self._logged = 0  # the global step of the last loss that was logged, or of the start
        self.reading: dict[str, Any] | None = None  # set only where the Trainer restores callbacks

    def close(self) -> None:
        """Restore the model."""
        self._instrumented.close()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: what was read so far."""
        recorder, reading = self.recorder, None
        if recorder and recorder.entered and (curves := recorder.session.curves):
            recorder.settle()
            if reading := curves.reading():
                reading["step"] = recorder.iteration
        return {"args": {}, "attributes": {"reading": reading}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()
        if getattr(args, "restore_callback_states_from_checkpoint", False) and state.global_step:
            raise ConfigError(
                "restore_callback_states_from_checkpoint=True replaces this callback by one without recipe and "
                "recorder: leave it out, since the callback restores its state itself"
            )
        self._instrumented.enter_context(instrument(given["model"], self.recipe, self.recorder, **self.options))
        if self.recorder:
            self.recorder.go_to(state.global_step)
            curves = self.recorder.session.curves if self.recorder.entered else None
            if curves and (reading := self._read_before(state)):
                curves.resume(reading)
        if state.stateful_callbacks is not None:  # the Trainer needs an entry, which not every checkpoint has
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self._logged = state.global_step

    def _read_before(self, state: Any) -> dict[str, Any] | None:
        """What was read before this global step, if the checkpoint says so."""
        kept = (state.stateful_callbacks or {}).get(type(self).__name__, [])
        for callback in kept if isinstance(kept, list) else [kept]:
            reading = callback.get("attributes", {}).get("reading")
            if reading and reading["step"] == state.global_step > 0:
                return dict(reading)
        return None

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.evaluate_every and state.global_step % self.evaluate_every == 0:
            self._evaluate(state)

    def _evaluate(self, state: Any) -> None:
        if self.recorder:
            self.recorder.evaluate(causal_loss, self.held_out, iteration=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.recorder:
            self.recorder.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self.recorder and logs and "loss" in logs:
            window = max(1, state.global_step - self._logged)
            self.recorder.log(loss=logs["loss"], grad_norm=logs.get("grad_norm"), window=window)
            self._logged = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.evaluate_every:
            self._evaluate(state)
        self.close()


def causal_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The logits of a causal model and the tokens that they predict, of a batch of the Trainer."""
    device = next(model.parameters()).device
    moved = {name: x.to(device) for name, x in batch.items()}
    labels = moved.pop("labels", moved["input_ids"])
    return model(**moved).logits[:, :-1], labels[:, 1:]
