"""python -m binade: the same as the command `binade`."""

from binade.cli import program

if __name__ == "__main__":
    program()
