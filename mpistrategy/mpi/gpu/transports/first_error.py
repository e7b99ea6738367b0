"""What goes wrong on some rank while all try something together: nobody may raise before all know."""

from __future__ import annotations

from collections.abc import Callable

from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.job.launcher import ranks_in_words


def trouble_of(work: Callable[[], str | None]) -> str:
    """Do something that must not raise, since the peers wait behind it; return what is wrong with it, "" if nothing."""
    try:
        return work() or ""
    except Exception as error:  # CUDA's, NCCL's or ours
        return f"{type(error).__name__}: {error}"


def first_error(ranks: Communicator, mine: str) -> str:
    """Return the trouble of some rank, with its number; "" if none has any.  Collective, and a barrier."""
    everyone = ranks.allgather_text(mine)
    those = [rank for rank, trouble in enumerate(everyone) if trouble]
    return f"{everyone[those[0]]} ({ranks_in_words(those)})" if those else ""
