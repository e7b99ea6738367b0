"""For models in torch: gradients summed over the ranks, equal starts, rows for each rank.

    import mpistrategy as ms
    import mpistrategy.torch as mst

    strategy = ms.MirroredStrategy()
    model = mst.broadcast(Net(), strategy=strategy)
    optimizer = mst.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), strategy=strategy)

The rest of a training loop for one process stays as it is.  Nothing of torch is imported before this package is.
"""

from mpistrategy.input.sampler import Sampler
from mpistrategy.torch.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from mpistrategy.torch.group import init_process_group
from mpistrategy.torch.optimizer import DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "Sampler",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "init_process_group",
    "reduce_scatter",
]


def __dir__() -> list[str]:
    return list(__all__)
