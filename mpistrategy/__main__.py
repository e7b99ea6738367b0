"""`python -m mpistrategy`: the command line."""

import sys

from mpistrategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
