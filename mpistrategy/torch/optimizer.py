"""DistributedOptimizer: any torch optimizer, with gradients that are combined over the ranks before each step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from mpistrategy.arrays.convert import host_array
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import CopyError, OptionError, OptionTypeError, ShapeError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.strategy.current import ReplicaContext, strategy_for
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch.collectives import all_reduce, replica_context

_WHERE = "DistributedOptimizer"
#: What a rank has of a parameter's gradient; the greatest of all ranks decides.
_NONE, _SPARSE, _DENSE = 0, 1, 2


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose gradients are combined over all ranks.  Creation is collective.

    `step` combines the gradient of every parameter, in one all-reduce, and then makes the optimizer's step.  To clip or
    unscale gradients in between, call `synchronize` before: the next `step` does not combine again.  Until then
    gradients are this rank's own, so that several backwards before a step accumulate as for one process.

    The result is written into the gradient that is there.  A parameter with a gradient on some ranks only counts as
    zeros on the others, and has one on all ranks afterwards.  Without a gradient on any rank it has none.  Sparse
    gradients stay sparse.  Which parameters there are, and which are frozen, is looked at anew each time.

    Every parameter gets rank 0's value at creation; buffers do not, see `broadcast`.  The optimizer that was given
    makes the steps; `param_groups` and `state` are the same objects, so that schedulers work with either.

    Args:
        optimizer: any of `torch.optim`.
        named_parameters: ``model.named_parameters()``, for messages.
        strategy: whose ranks; None for the strategy of this scope or step.
        aggregation: "MEAN" or "SUM".
        wire: the dtype in which gradients travel between nodes, as in `CommunicationOptions`.
        name: is compared between the ranks instead of the call site.

    Raises:
        OptionTypeError, OptionError: for what is no optimizer, or is distributed already; for other aggregations; for
            names that are not unique; under "SUM", for a parameter that another DistributedOptimizer has.
        CollectiveMismatchError: on every rank, when the ranks' parameters differ.
    """

    #: The living ones under "SUM", to find parameters that two of them would sum.
    _summing: ClassVar[weakref.WeakSet[DistributedOptimizer]] = weakref.WeakSet()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        *,
        strategy: Strategy | None = None,
        aggregation: Op = "MEAN",
        wire: Any = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionTypeError.at(
                _WHERE,
                found=f"optimizer={optimizer!r:.60}",
                expected="an optimizer of torch.optim",
                fix="Make one of the parameters first: DistributedOptimizer(torch.optim.SGD(...)).",
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise OptionError.at(_WHERE, found="an optimizer that is distributed already", expected="it as it was made")
        self._op = ReduceOp._parse(aggregation, _WHERE)
        if self._op not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise OptionError.at(_WHERE, found=f"aggregation={aggregation!r}", expected="'MEAN' or 'SUM'")
        self._names = _names_of(named_parameters)
        self._strategy: Strategy = strategy_for(strategy, _WHERE)
        self._options = CommunicationOptions(wire=wire)
        self.optimizer: torch.optim.Optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._follow()
        self._is_synchronized, self._synchronizes, self._steps = False, True, 0
        if self._op is ReduceOp.SUM:
            self._refuse_shared()
            self._summing.add(self)
        parameters = self._parameters()
        with Call(self._strategy.extended.communicator.guard, _WHERE, called=name) as call:
            call.structure = ", ".join(f"{key} {_dtype(each)}{list(each.shape)}" for key, each in parameters)
            call.agree("distribute an optimizer", op=self._op.value, options=f"{type(optimizer).__name__}, {wire=}")
            call.expect_more()
            tensors = [each.detach() for _, each in parameters]
            for tensor, value in zip(tensors, self._strategy.broadcast(tensors), strict=True):
                tensor.copy_(value)

    def _follow(self) -> None:
        """Share the groups and the state of the optimizer that makes the steps."""
        self.__dict__["param_groups"] = self.optimizer.param_groups
        self.__dict__["state"] = self.optimizer.state

    def _parameters(self) -> list[tuple[str, Any]]:
        """Return the names and tensors of all parameters, each once."""
        found: dict[int, tuple[str, Any]] = {}
        for at, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {n} of group {at}" for n in range(len(group["params"]))]
            for tensor, name in zip(group["params"], names, strict=True):
                found.setdefault(id(tensor), (self._names.get(id(tensor), name), tensor))
        return list(found.values())

    def _refuse_shared(self) -> None:
        mine = {id(tensor): name for name, tensor in self._parameters()}
        for other in self._summing:
            for tensor in (each for group in other.param_groups for each in group["params"]):
                if id(tensor) in mine:
                    raise OptionError.at(
                        _WHERE,
                        found=f"{mine[id(tensor)]!r}, whose gradient another DistributedOptimizer sums, too",
                        expected="a parameter in one of them: its gradient would be summed twice",
                        fix="Delete the other optimizer first, or use aggregation='MEAN'.",
                    )

    # ------------------------------------------------------------------------------------------------ the steps

    def synchronize(self) -> None:
        """Combine the gradient of every parameter over the ranks.  Collective.

        The next `step` does not do so again; after `zero_grad` it does.

        Raises:
            CollectiveMismatchError: on every rank, when parameters differ, or a rank has left out a step.
            ShapeError: on every rank, for a gradient whose elements share memory on some rank.
        """
        parameters = self._parameters()
        guard = self._strategy.extended.communicator.guard
        device = parameters[0][1].device if parameters else None
        with (
            replica_context(self._strategy, device) as context,
            torch.no_grad(),
            Call(guard, f"{_WHERE}.synchronize", anywhere=True) as call,
        ):
            call.name = f"step {self._steps}"
            call.structure = ", ".join(f"{key} {_dtype(each)}{list(each.shape)}" for key, each in parameters)
            kinds = np.array([_kind(*each) for each in parameters], np.int8)
            kinds = context.all_reduce("MAX", kinds)
            dense = [_dense(each) for (_, each), kind in zip(parameters, kinds, strict=True) if kind == _DENSE]
            self._combine({each.data_ptr(): each for each in dense if each.numel()}, context)
            for (name, each), kind in zip(parameters, kinds, strict=True):
                if kind == _SPARSE:
                    each.grad = _combined_rows(name, each, self._op, context)
        self._is_synchronized = True
        self._steps += 1

    def _combine(self, gradients: dict[int, Any], context: ReplicaContext) -> None:
        """Write the combined gradients into the tensors that are there."""
        found = list(gradients.values())
        if not found:
            return
        whole = [each.float() if each.dtype in (torch.bfloat16, torch.float16) else each for each in found]
        context.all_reduce(self._op, whole, self._options, out=whole)
        for each, total in zip(found, whole, strict=True):
            if total is not each:
                each.copy_(total)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` combine no gradients: they are combined, or this rank's own on purpose."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients unless `synchronize` has done so, and make the optimizer's step.  Collective.

        Args:
            closure: computes the loss and its gradients; it is called with this rank's gradients, which are combined
                after each call, and the loss is the mean over the ranks.

        Returns:
            What the optimizer returns.
        """
        if closure is None:
            if self._synchronizes and not self._is_synchronized:
                self.synchronize()
            self._is_synchronized = False
            return self.optimizer.step()

        def together() -> Any:
            loss = closure()
            self.synchronize()
            return loss if loss is None else all_reduce(loss.detach(), strategy=self._strategy, name="a closure's loss")

        result = self.optimizer.step(together)
        self._is_synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the optimizer does."""
        self._is_synchronized = False
        self.optimizer.zero_grad(set_to_none)

    # --------------------------------------------------------------------------------------- what torch asks for

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which must be equal on all ranks: call `broadcast` on them."""
        if "param_groups" in vars(self) and self.param_groups is self.optimizer.param_groups:
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)  # of the groups that the optimizer has

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer a state."""
        self.optimizer.load_state_dict(state_dict)
        self._follow()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _no_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _no_copy()

    def __repr__(self) -> str:
        return f"<DistributedOptimizer, {self._op.value}, of {self.optimizer!r}>"


def _no_copy() -> CopyError:
    return CopyError.at(
        _WHERE,
        found="a copy or a pickle of a distributed optimizer",
        expected="one that works with the ranks of its strategy",
        fix="Copy `optimizer.optimizer` and make a DistributedOptimizer of the copy, or save optimizer.state_dict().",
    )


def _names_of(named_parameters: Iterable[tuple[str, Any]] | None) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, tensor in named_parameters or ():
        if name in found.values():
            raise OptionError.at(_WHERE, found=f"two parameters named {name!r}", expected="a name for each parameter")
        found.setdefault(id(tensor), name)
    return found


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(name: str, parameter: Any) -> int:
    """Return what this rank has of a parameter's gradient; raise for one that cannot be written."""
    grad = parameter.grad
    if grad is None:
        return _NONE
    if grad.is_sparse:
        return _SPARSE
    if torch._debug_has_internal_overlap(grad) == 1:
        raise ShapeError.at(
            _WHERE,
            found=f"a gradient of {name!r} whose elements share memory",
            expected="a tensor with memory for each element",
            fix="Set .grad to a contiguous tensor.",
        )
    return _DENSE


def _dense(parameter: Any) -> Any:
    """Return a parameter's gradient as a dense tensor: zeros where this rank has none."""
    grad = parameter.grad
    if grad is None:
        grad = parameter.grad = torch.zeros_like(parameter)
    elif grad.is_sparse:
        grad = parameter.grad = grad.to_dense()
    return grad.detach()


def _combined_rows(name: str, parameter: Any, op: ReduceOp, context: ReplicaContext) -> Any:
    """Return a sparse gradient: the rows of all ranks."""
    shape = parameter.shape
    if parameter.grad is None:
        indices = np.empty(0, np.int64)
        values = torch.empty((0, *shape[1:]), dtype=parameter.dtype)
    else:
        grad = parameter.grad.coalesce()
        if grad.sparse_dim() != 1:
            raise UnsupportedError.at(
                _WHERE,
                found=f"a gradient of {name!r} that is sparse in {grad.sparse_dim()} dimensions",
                expected="one whose rows are sparse, as Embedding(sparse=True) makes",
                fix="Make it dense.",
            )
        indices, values = host_array(grad.indices()[0]), grad.values()
    wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    total = context.all_reduce(op, IndexedSlices(host_array(wide), indices, tuple(shape)))
    rows = torch.as_tensor(total.values).to(values.dtype)
    found = torch.sparse_coo_tensor(
        torch.as_tensor(total.indices)[None], rows, shape, device=parameter.device, check_invariants=False
    )
    return found.coalesce()
