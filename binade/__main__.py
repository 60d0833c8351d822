"""python -m binade: the same as the command `binade`."""

import sys

from binade.cli import main

if __name__ == "__main__":
    sys.exit(main())
