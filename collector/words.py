"""Text for a terminal."""


def one_line(text: str) -> str:
    """What a user typed may hold line breaks and escape sequences: shown, not obeyed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
