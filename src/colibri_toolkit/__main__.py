"""`python -m colibri_toolkit` is the command `colibri`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
