"""DistributedOptimizer: any torch optimizer, with gradients that are summed over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.objects.settings import checked_count
from mpistrategy.options import Op, ReduceOp
from mpistrategy.strategy.current import strategy_for
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch.collectives import all_reduce
from mpistrategy.torch.gradients import WHERE, Gradients
from mpistrategy.training.gradient_buckets import DEFAULT_BYTES_PER_BUCKET

Optimizer = TypeVar("Optimizer")


class Distributed:
    """What `DistributedOptimizer` adds to the class of an optimizer."""

    _gradients: Gradients
    param_groups: list[dict[str, Any]]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add to this rank's gradients alone: for all batches of a step but the last.

        The next backward outside of it sums what has gathered; else `step` does.
        """
        before, self._gradients.is_syncing = self._gradients.is_syncing, False
        try:
            yield
        finally:
            self._gradients.is_syncing = before

    def synchronize(self) -> None:
        """Sum the gradients that have not been summed, if there are any.  Collective.

        Only after `no_sync`, to clip or look at gradients before `step`.
        """
        self._gradients.sum_rest(self.param_groups)


def DistributedOptimizer(  # noqa: N802  # the name that users of Horovod look for
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    *,
    strategy: Strategy | None = None,
    aggregation: Op = "MEAN",
    wire: Any = None,
    bytes_per_bucket: int = DEFAULT_BYTES_PER_BUCKET,
    name: str | None = None,
) -> Optimizer:
    """Let an optimizer work with gradients that are combined over all ranks.  Collective.

    When `backward` returns, the gradients are those of all ranks: clip them, unscale them, look at them.  Several
    backwards in one step belong in `no_sync`, except for the last.  Parameters without a gradient have none on every
    rank, frozen ones stay as they are, and sparse gradients of embeddings stay sparse.  A closure is called with
    combined gradients, and its loss is the mean over the ranks.

    Every parameter gets rank 0's value here; buffers do not, see `broadcast`.

    Args:
        optimizer: any of `torch.optim`.
        named_parameters: ``model.named_parameters()``, for messages.
        strategy: whose ranks; None for the strategy of this scope or step.
        aggregation: "MEAN" or "SUM".
        wire: the dtype in which gradients travel between nodes, as in `CommunicationOptions`.
        bytes_per_bucket: what travels between nodes in one piece.
        name: is compared between the ranks instead of the call site.

    Returns:
        `optimizer` itself, which now has `no_sync` and `synchronize`, too (see `Distributed`).

    Raises:
        OptionTypeError, OptionError: for what is no optimizer, or is distributed already, and for other aggregations.
        CollectiveMismatchError: on every rank, when the ranks' parameters differ; at a sum, when a rank has gradients
            of other parameters, or is at another step: the text names them.
    """
    given: Any = optimizer
    if not isinstance(given, torch.optim.Optimizer):
        raise OptionTypeError.at(WHERE, found=f"optimizer={given!r:.60}", expected="an optimizer of torch.optim")
    if isinstance(given, Distributed):
        raise OptionError.at(WHERE, found="an optimizer that is distributed already", expected="it as it was made")
    checked_count(WHERE, "bytes_per_bucket", bytes_per_bucket)
    op = ReduceOp._parse(aggregation, WHERE)
    if op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise OptionError.at(WHERE, found=f"aggregation={aggregation!r}", expected="'MEAN' or 'SUM'")
    of = strategy_for(strategy, WHERE)
    kind = type(given)
    made: Any = type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    names = {id(tensor): key for key, tensor in named_parameters or ()}
    gradients = Gradients(of, op, wire, bytes_per_bucket, names)
    with Call(of.extended.communicator.guard, WHERE, called=name) as call:
        found = gradients.take_in(given.param_groups)
        gradients.watch(sum_these=False)
        call.structure = ", ".join(map(str, found))
        call.agree("distribute an optimizer", op=op.value, options=f"{kind.__name__}, {wire=}, {bytes_per_bucket=}")
        call.expect_more()
        tensors = [each.tensor.detach() for each in found]
        for tensor, value in zip(tensors, of.broadcast(tensors), strict=True):
            tensor.copy_(value)
    given.__class__ = made
    given.__dict__["_gradients"] = gradients

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            gradients.sum_rest(optimizer.param_groups)
            return None

        def together() -> Any:
            loss = closure()
            gradients.sum_rest(optimizer.param_groups)
            return loss if loss is None else all_reduce(loss, strategy=of, name="the loss of a closure")

        return ((args[0], together), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": together})

    given.register_step_pre_hook(before)
    given.register_step_post_hook(lambda *_: gradients.step_is_over())
    return optimizer
