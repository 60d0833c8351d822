"""The blocks of a model: their outputs in the pass of a base, and how far those of a treatment are from them.

A block's error has two parts. With the inputs that it receives, it inherits the errors of the blocks before; with the
inputs of the base, only its own rounding is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from binade.collector.capture.adapters.layer import set_on
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.errors import ConfigError
from binade.collector.experiment.treatments import Key

Given = tuple[tuple[Any, ...], dict[str, Any]]
Errors = dict[nn.Module, tuple[float, ...]]


@dataclass(eq=False)
class BlockOutputs:
    """The outputs of a model's blocks in the pass of a base, in the order in which the blocks ended.

    most   how many bytes are kept
    given  what each block whose output is kept was called with
    first  how many blocks had ended when a product was first computed
    """

    most: int
    outputs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    given: dict[nn.Module, Given] = field(default_factory=dict)
    ended: list[nn.Module] = field(default_factory=list)
    first: dict[Key, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, block: nn.Module, output: Any, given: Given) -> None:
        size = sum(x.nbytes for x in tensors_in(output))
        if len(self.outputs) == len(self.ended) and self.bytes + size <= self.most:
            self.outputs.append((block, output))
            self.given[block] = given
            self.bytes += size
        self.ended.append(block)

    @property
    def repeats(self) -> bool:
        """Whether a block ran twice."""
        return len(set(self.ended)) < len(self.ended)

    def before(self, keys: Iterable[Key]) -> dict[nn.Module, Any]:
        """The blocks that compute the same in a pass that rounds these products, with their outputs: those that had
        ended before, as far as outputs were kept. None if a block runs twice in a pass."""
        if self.repeats:
            return {}
        ended = min((self.first[key] for key in keys if key in self.first), default=len(self.ended))
        return dict(self.outputs[:ended])

    def kept(self, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """A context in which the outputs of these blocks are added."""

        def keep(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self.add(block, output, (args, kwargs))
            return output

        return _in_place_of(blocks, keep)

    @contextmanager
    def compared(self, sequences: int, sequence_first: bool, gives_inputs: bool) -> Iterator[Errors]:
        """A context in which the errors of the blocks' outputs are added: ‖ŷ − y‖ / ‖y‖ of each sequence, where y is
        the output in the pass of the base.

        sequence_first  whether outputs are [tokens, sequences, ...]
        gives_inputs    whether each block gets the tensors that it got in that pass

        Raises ConfigError if a block runs twice in a pass, or if not all outputs were kept."""
        if self.repeats or not self.outputs or len(self.outputs) < len(self.ended):
            why = "one runs twice in a pass" if self.repeats else f"their outputs exceed {self.most >> 30} GiB"
            raise ConfigError(f"errors of blocks cannot be measured: {why if self.ended else 'the model has none'}")
        errors: Errors = {}
        exact = dict(self.outputs)

        def compare(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if gives_inputs:
                args, kwargs = _exchanged((args, kwargs), self.given[block])
            output = forward(*args, **kwargs)
            errors[block] = relative_errors(output, exact[block], sequences, sequence_first)
            return output

        with _in_place_of(exact, compare):
            yield errors


@contextmanager
def _in_place_of(blocks: Iterable[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """A context in which call(block, its forward, arguments) runs in the place of the forward of each block."""
    with ExitStack() as undo:
        for block in blocks:
            undo.callback(set_on(block, "forward", partial(call, block, block.forward)))
        yield


def _exchanged(given: Given, other: Given) -> Given:
    """These arguments with the tensors of the other call. What is no tensor, such as a cache, stays."""
    (args, kwargs), (other_args, other_kwargs) = given, other
    exchanged = [b if isinstance(a, Tensor) else a for a, b in zip(args, other_args, strict=True)]
    named = {name: other_kwargs[name] if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    return tuple(exchanged), named


def relative_errors(output: Any, exact: Any, sequences: int, sequence_first: bool) -> tuple[float, ...]:
    """‖ŷ − y‖ / ‖y‖ of each sequence, of the first tensor of a block's output: [sequences, tokens, ...],
    [tokens, sequences, ...] or flattened tokens of one sequence after the other."""
    values = next(tensors_in(output)).double(), next(tensors_in(exact)).double()
    shape = values[1].shape
    if sequence_first or (len(shape) > 2 and shape[0] != sequences == shape[1]):
        values = values[0].transpose(0, 1), values[1].transpose(0, 1)
    ours, theirs = (x.reshape(sequences, -1) for x in values)
    ratios: Sequence[float] = ((ours - theirs).square().sum(1) / theirs.square().sum(1)).sqrt().tolist()
    return tuple(ratios)
