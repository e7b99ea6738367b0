"""`python -m mpistrategy`: the command line."""

import sys

from mpistrategy.cli import main

sys.exit(main())
