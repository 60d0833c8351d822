"""Evaluates batches under treatments, and computes no block again that computes the same.

    with evaluator_of(model, loss) as evaluator:
        for number, batch in enumerate(batches):
            exact = evaluator.begin(base, batch, number)
            rounded = evaluator.evaluate(treatment)

Within a batch, the blocks before the first layer that a treatment changes compute the same as in the pass of its base.
Their outputs are kept from that pass and returned in their place. A block is a module whose path ends in a number, such
as `model.layers.3`. Passes have no gradients, and the model is in eval mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.layer import set_on
from binade.collector.capture.clock import seed_of
from binade.collector.capture.evaluation import IGNORED, Evaluate, evaluating, has_logits, of_logits, sequence_losses
from binade.collector.capture.instrument import instrument
from binade.collector.capture.observer import Hook
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.survey import find
from binade.collector.errors import ConfigError
from binade.collector.experiment.blocks import BlockOutputs, Errors
from binade.collector.experiment.routes import Routes
from binade.collector.experiment.treatments import Key, Treatment
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import Call
from binade.collector.models.site import Site
from binade.data.run.experiment import BatchResult, BlockError, RouterChoices
from binade.data.run.tensor_kinds import Product
from binade.quant.gemm import Observed, Rounding
from binade.quant.specs import GemmFormats

COVERS = {True: "mxfp8", False: "linear_mxfp8"}  # recipes that intercept all products, or all but those of attention
MOST_KEPT = 4 << 30  # bytes of blocks' outputs


class Evaluator:
    """Evaluates a model with its products rounded by treatments.

    products  those that can be rounded, in the order of the model
    blocks    the layers of the blocks, from 1, in the order of the model
    reuses    whether outputs of blocks are kept: not in a model that computes something else with them. None before
              the first `begin`
    rest      how many seconds a pass takes in which all blocks are replaced
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        recorder: Recorder,
        products: Sequence[Key],
        blocks: Mapping[nn.Module, int],
        seed: int,
    ) -> None:
        self.model, self.products, self.blocks = model, tuple(products), dict(blocks)
        self.reuses: bool | None = None
        self.rest = 0.0
        self._evaluate, self._clock, self._seed = evaluate, recorder.clock, seed
        self._batch: Any = None
        self._number = self._sequences = 0
        self._formats: Mapping[Key, GemmFormats] = {}  # of the base
        self._before: list[Tensor] = []  # log-probabilities of each sequence, of the base
        self._routes: Routes | None = None  # of the base
        self._outputs = BlockOutputs(0)
        self._gives_inputs = False  # whether it was seen that blocks can be given inputs

    def begin(self, base: Treatment, batch: Any, number: int) -> BatchResult:
        """Evaluate a batch under a base. The next calls of `evaluate` are for the same batch. number: of the batch;
        stochastic rounding depends on it. Raises ConfigError for a loss of another form than `measure` takes."""
        self._batch, self._number, self._formats, self._before = batch, number, base.formats, []
        self._routes = Routes() if base.keeps_routes else None
        self._outputs = BlockOutputs(MOST_KEPT)
        with self._outputs.kept(self.blocks):
            exact = self._result(base, first=self._outputs.first, routes=self._routes)
        self._sequences = len(exact.losses)
        if self.reuses is None:
            self.reuses = True
            again = self._result(base, replaced=self._outputs.before(()))
            self.reuses, self.rest = again.losses == exact.losses, again.seconds
        return exact

    def evaluate(self, treatment: Treatment) -> BatchResult:
        """Evaluate the batch of the last `begin` under a treatment of its base. If routes are kept or replayed, or
        errors of blocks are measured, no block is replaced. Raises ConfigError if the number of sequences is another,
        or if errors of blocks cannot be measured."""
        if treatment.key.replays or treatment.keeps_routes:
            found = self._routes.found if treatment.key.replays and self._routes else {}
            result = self._result(treatment, routes=Routes(found))
        elif treatment.keeps_blocks:
            result = self._with_blocks(treatment)
        else:
            result = self._result(treatment, replaced=self._replaced(treatment))
        if len(result.losses) != self._sequences:
            raise ConfigError(
                f"loss returned {self._sequences} sequences, then {len(result.losses)} for the same batch: evaluate a "
                "batch alike each time"
            )
        return result

    def cost(self, treatment: Treatment) -> float:
        """The share of the blocks that a treatment computes, 0 to 1, or 2 if it takes two passes; after `begin`."""
        if treatment.keeps_blocks:
            return 2.0
        return 1 - len(self._replaced(treatment)) / max(len(self._outputs.ended), 1)

    def _with_blocks(self, treatment: Treatment) -> BatchResult:
        """The result of a pass, with the errors of the blocks in that pass and in another one, in which each block is
        given the inputs of the base."""
        shape = self._sequences, isinstance(self.model, GPTModel)

        def own_errors(formats: Mapping[Key, GemmFormats]) -> Errors:
            with self._outputs.compared(*shape, gives_inputs=True) as found:
                self._pass(formats, None, {}, None)
            return found

        if not self._gives_inputs:
            if any(map(any, own_errors(self._formats).values())):
                raise ConfigError(
                    "errors of blocks cannot be measured: given the same inputs, a block of this model has another "
                    "output in a second pass without rounding"
                )
            self._gives_inputs = True
        with self._outputs.compared(*shape, gives_inputs=False) as received:
            result = self._result(treatment)
        own = own_errors(treatment.formats)
        layers = [(self.blocks[block], received[block], own[block]) for block in received]
        blocks = (tuple(BlockError(layer, a[at], b[at]) for layer, a, b in layers) for at in range(self._sequences))
        return replace(result, blocks=tuple(blocks))

    def operand_values(self, batch: Any) -> dict[Key, tuple[int, int]]:
        """How many values the two operands of each product's forward GEMM have in a batch, from a pass of its own.
        Products that the pass does not compute are left out."""
        counts: dict[Key, dict[str, int]] = {}

        def begin(hook: Hook) -> Call:
            own = counts.setdefault((hook.layer.site, hook.product), {"a": 0, "b": 0})

            def count(seen: Observed) -> None:
                if seen.name in own:
                    own[seen.name] += seen.tensor.numel()

            return Call(tap=count)

        with ExitStack() as undo:
            undo.callback(setattr, self._clock, "twin", None)
            self._clock.twin = begin
            with torch.no_grad():
                self._evaluate(self.model, batch)
        return {key: (counts[key]["a"], counts[key]["b"]) for key in self.products if key in counts}

    def _replaced(self, treatment: Treatment) -> dict[nn.Module, Any]:
        """The blocks that compute the same as in the last `begin`, with their outputs."""
        changed = [key for key in self.products if treatment.formats.get(key) != self._formats.get(key)]
        return self._outputs.before(changed) if self.reuses else {}

    def _result(
        self,
        treatment: Treatment,
        first: dict[Key, int] | None = None,
        replaced: Mapping[nn.Module, Any] = {},
        routes: Routes | None = None,
    ) -> BatchResult:
        began = time.perf_counter()
        answer = self._pass(treatment.formats, first, replaced, routes)
        if not has_logits(answer):
            if treatment.keeps_tokens:
                raise ConfigError("the loss of the model is known, but not its logits: return logits and labels")
            losses = sequence_losses(answer)
            tokens = (answer.shape[1] if answer.dim() == 2 else None,) * len(losses)
            return BatchResult(treatment.key, self._number, losses, tokens, seconds=time.perf_counter() - began)
        return self._of_logits(treatment, answer, routes, began)

    def _of_logits(
        self, treatment: Treatment, answer: tuple[Tensor, Tensor], routes: Routes | None, began: float
    ) -> BatchResult:
        losses, tokens, kl, kl_reversed, logprobs = [], [], [], [], []
        is_base, counts = treatment.base is None, answer[1] != IGNORED
        keeps = not self._before
        for number, (loss, after, label) in enumerate(of_logits(*answer)):
            counted = label != IGNORED
            losses.append(loss)
            tokens.append(int(counted.sum()))
            if keeps:
                self._before.append(after)
            if not is_base:
                before = self._before[number] if number < len(self._before) else after
                kl.append(_divergence(before, after, counted))
                if treatment.keeps_tokens:
                    kl_reversed.append(_divergence(after, before, counted))
            if treatment.keeps_tokens:
                own = after.gather(-1, label.where(counted, 0)[:, None])[:, 0]
                logprobs.append(own[counted].double().cpu().numpy())
        chosen: tuple[tuple[RouterChoices, ...], ...] = ()
        if treatment.keeps_routes and routes:
            chosen = routes.by_sequence(self._routers, counts, isinstance(self.model, GPTModel))
        seconds = time.perf_counter() - began
        return BatchResult(
            treatment.key, self._number, tuple(losses), tuple(tokens), tuple(kl), tuple(kl_reversed), seconds,
            tuple(logprobs), chosen,
        )  # fmt: skip

    @property
    def _routers(self) -> list[Site]:
        return [site for site, product in self.products if site.is_router and product is Product.LINEAR]

    def _pass(
        self,
        formats: Mapping[Key, GemmFormats],
        first: dict[Key, int] | None,
        replaced: Mapping[nn.Module, Any],
        routes: Routes | None,
    ) -> Any:
        """What `evaluate` returns. first: receives how many blocks had ended when each product was first computed."""

        def begin(hook: Hook) -> Call:
            key = hook.layer.site, hook.product
            if routes:
                routes.begun(hook.layer)
            if first is not None:
                first.setdefault(key, len(self._outputs.ended))
            seed = seed_of(self._seed, self._number, key[0].name, key[1].value)
            return Call(Rounding(formats.get(key) or GemmFormats(), hook.backend, seed))

        with ExitStack() as undo:
            for block, output in replaced.items():
                undo.callback(set_on(block, "forward", _returning(output)))
            undo.callback(setattr, self._clock, "twin", None)
            self._clock.twin = begin
            with torch.no_grad(), routes or nullcontext():
                return self._evaluate(self.model, self._batch)


def _divergence(p: Tensor, q: Tensor, counted: Tensor) -> float:
    """KL(p ‖ q) of log-probabilities [tokens, vocabulary], the mean over the tokens that count."""
    return float((p.exp() * (p - q)).sum(-1)[counted].mean())


def _returning(output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: output


@contextmanager
def evaluator_of(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    attention: bool = True,
    backend: str = "auto",
    seed: int = 0,
    exclude: Sequence[str] = (),
    cores: Sequence[str] = (),
    products: Mapping[str, Equations] = {},
    head: bool = False,
) -> Iterator[Evaluator]:
    """A context in which a model is measured. attention: whether products of attention can be rounded, too; then they
    are computed as products of their own in all passes. The other arguments are those of `instrument`.

    Raises InstrumentError as `instrument` does."""
    options: dict[str, Any] = {"exclude": exclude, "head": head, "cores": cores, "products": products}
    layers = find(model, attention=attention, **options).layers
    keys = [(layer.site, product) for layer in layers for product in layer.products]
    if not attention:
        keys = [key for key in keys if key[1] not in (Product.QK, Product.PV)]
    paths = {_block(layer.name): layer.site.layer_index for layer in reversed(layers)}
    blocks = {model.get_submodule(path): layer for path, layer in reversed(paths.items()) if path}
    recorder = Recorder(enabled=False)
    with (
        evaluating(model),
        instrument(model, COVERS[attention], recorder, backend=backend, seed=seed, **options),
    ):
        yield Evaluator(model, evaluate, recorder, keys, blocks, seed)


def _block(path: str) -> str:
    """The path of the block that a module is in: up to its first number; "" if it is in none."""
    parts = path.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])
