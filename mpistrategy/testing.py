"""For unit tests and notebooks: several replicas in one process, without MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mpistrategy.errors import CollectiveMismatchError, OptionError, OptionTypeError
from mpistrategy.mpi.over_threads import run_threads
from mpistrategy.objects.nearest import make_public

__all__ = [
    "run_replicas",
    "run_threads",
]

make_public(__name__)


T = TypeVar("T")


def run_replicas(fn: Callable[[], T], n: int, *, nodes: Sequence[int] | None = None) -> list[T]:
    """Run a program on `n` simulated ranks, threads of this process that take turns; return their results.

    Inside `fn`, `MirroredStrategy()` has `n` replicas, and everything works as under mpiexec.  The replicas run one at
    a time, in rank order, and change at every collective: the same program runs the same way every time.

    Args:
        fn: the program, without arguments.
        n: the number of replicas, 1 or more.
        nodes: the node of each rank, to test algorithms that know about nodes; None puts all on one.

    Returns:
        What `fn` returned on each rank, in rank order.

    Raises:
        OptionError, OptionTypeError: for an impossible `n` or `nodes`.
        Exception: whatever a replica raised; of several, the first that is no mere consequence of another.

    >>> import mpistrategy as ms
    >>> def program():
    ...     strategy = ms.MirroredStrategy()
    ...     return strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1))
    >>> run_replicas(program, 3)
    [np.int64(3), np.int64(3), np.int64(3)]
    """
    if not callable(fn):
        raise OptionTypeError.at("run_replicas", found=f"fn={fn!r}", expected="a function without arguments")
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise OptionTypeError.at("run_replicas", found=f"n={n!r}", expected="an int")
    if nodes is not None and not isinstance(nodes, Sequence):
        raise OptionTypeError.at("run_replicas", found=f"nodes={nodes!r}", expected="a list of node numbers, or None")
    if n < 1 or (nodes is not None and len(nodes) != n):
        raise OptionError.at(
            "run_replicas", found=f"n={n}, nodes={nodes!r}", expected="n >= 1 and one node for each rank"
        )
    endings = run_threads(fn, int(n), nodes)
    failed = [(rank, ending.error) for rank, ending in enumerate(endings) if ending.error is not None]
    if failed:
        causes = [pair for pair in failed if not isinstance(pair[1], CollectiveMismatchError)]
        rank, error = (causes or failed)[0]
        error.add_note(f"raised on replica {rank} of {n}")
        raise error
    return [ending.result for ending in endings]
