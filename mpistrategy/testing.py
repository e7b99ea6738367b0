"""For unit tests and notebooks: several replicas in one process, without MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mpistrategy.errors import CollectiveMismatchError, OptionError, OptionTypeError
from mpistrategy.mpi.over_threads import run_threads
from mpistrategy.objects.settings import checked_count, checked_type

__all__ = [
    "run_replicas",
    "run_threads",
]


def __dir__() -> list[str]:
    return list(__all__)


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
    count = checked_count("run_replicas", "n", n)
    checked_type("run_replicas", "nodes", nodes, (Sequence, type(None)), "a list of node numbers, or None")
    if nodes is not None and len(nodes) != count:
        raise OptionError.at("run_replicas", found=f"n={n}, nodes={nodes!r}", expected="one node for each rank")
    endings = run_threads(fn, count, nodes)
    failed = [(rank, ending.error) for rank, ending in enumerate(endings) if ending.error is not None]
    if failed:
        rank, error = min(failed, key=lambda pair: isinstance(pair[1], CollectiveMismatchError))
        error.add_note(f"raised on replica {rank} of {n}")
        raise error
    return [ending.result for ending in endings]
