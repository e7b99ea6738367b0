"""Measurements for those who change the library; each is a file beside this one.

    scripts/mpirun -n 2 scripts/bench NAME [OPTION...]
    MPIR_CVAR_NUM_CLIQUES=8 scripts/mpirun -n 16 scripts/bench sizes       MPICH pretends 8 nodes
    .venv/bin/python scripts/bench calls                                   calls, growth: one process

`mpistrategy bench` is for users: sums of one array and of lists on their machine.
"""

from __future__ import annotations

import argparse
from importlib import import_module


def parse_arguments() -> argparse.Namespace:
    """Return the name of the measurement, and its options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    names = parser.add_subparsers(dest="name", required=True)
    calls = names.add_parser("calls", help="a rank's own work of one repeated small call, beside a sketch of the least")
    calls.add_argument("--rounds", type=int, default=100, help="of thirty calls each; default: %(default)s")
    sizes = names.add_parser("sizes", parents=[timed], help="all-reduces beside mpi4py's")
    sizes.add_argument("bytes", nargs="*", type=int, default=[8, 4096, 65536, 2**18, 2**20, 2**22, 2**24])
    torch = names.add_parser("torch_steps", parents=[timed], help="torch's training steps and all-reduces beside gloo")
    torch.add_argument("models", nargs="*", default=["mlp", "cnn"], metavar="MODEL")
    growth = names.add_parser("growth", help="what a rank does when there are very many")
    growth.add_argument("ranks", nargs="*", type=int, default=[64, 1024, 10_000], help="pretended, 8 on a node")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()
    import_module(options.name).measure(options)
