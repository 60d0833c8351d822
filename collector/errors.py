"""What the collector raises beside its libraries' own. No torch."""


class ConfigError(ValueError):
    """A choice that cannot be run. The message says what was wrong, what was expected and what to do."""


class DataError(RuntimeError):
    """A dataset that was found good gives no tokens now."""
