"""`python -m mpistrategy`: the command line."""

import sys

from mpistrategy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
