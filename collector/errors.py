"""The collector's exceptions. No torch."""

from collections.abc import Iterator
from contextlib import contextmanager

from binade.data.words.text import describe


class ConfigError(ValueError):
    """A setting that cannot be run. The message says what was wrong, what was expected and what to do."""

    exit_status = 2


class AdviceError(ConfigError):
    """Advice is not possible. The message says what is missing and what to do."""

    exit_status = 1

    @property
    def sentence(self) -> str:
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


class DataError(RuntimeError):
    """A dataset that passed the checks can no longer be read."""


class TimeLimitError(RuntimeError):
    """The job is close to the cluster's time limit."""


@contextmanager
def raising(kind: type[Exception], what: str, *errors: type[Exception]) -> Iterator[None]:
    """A context that, in place of these errors, raises one of this kind: "what: the reason"."""
    try:
        yield
    except errors as error:
        raise kind(f"{what}: {describe(error)}") from error
