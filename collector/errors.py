"""What the collector raises beside its libraries' own. No torch."""


class ConfigError(ValueError):
    """A choice that cannot be run. The message says what was wrong, what was expected and what to do."""

    exit_status = 2


class DataError(RuntimeError):
    """A dataset that was found good gives no tokens now."""


class TimeLimitError(RuntimeError):
    """The cluster's time limit of the job is near."""
