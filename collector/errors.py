"""The collector's exceptions. No torch."""


class ConfigError(ValueError):
    """A setting that cannot be run. The message says what was wrong, what was expected and what to do."""

    exit_status = 2


class DataError(RuntimeError):
    """A dataset that passed the checks can no longer be read."""


class TimeLimitError(RuntimeError):
    """The job is close to the cluster's time limit."""
