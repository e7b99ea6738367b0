"""DistributedOptimizer: any torch optimizer, with gradients that are combined over the ranks before each step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from mpistrategy.errors import CopyError, OptionError, OptionTypeError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import CommunicationOptions, Op, ReduceOp
from mpistrategy.strategy.strategy import Strategy, strategy_for
from mpistrategy.torch import tensors as t
from mpistrategy.torch.collectives import all_reduce, broadcast

_WHERE = "DistributedOptimizer"
#: The kind of a parameter's gradient on a rank, 0 for none; the greatest kind of all ranks decides.
_SPARSE, _DENSE = 1, 2


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose gradients are combined over all ranks.  Creation is collective.

    `step` combines the gradient of every parameter, in one all-reduce, and then makes the optimizer's step.  To clip or
    unscale gradients in between, call `synchronize` before: the next `step` does not combine again, unless there was
    another backward (with SUM, clear the gradients before that: sums would be summed again).  Until then gradients are
    this rank's own, so that several backwards before a step accumulate as for one process.

    The result is written into the existing gradient.  If only some ranks have a gradient of a parameter, the other
    ranks add zeros, and all ranks have a gradient afterwards.  If no rank has a gradient, none is made.  Sparse
    gradients stay sparse.  Parameters may be added and frozen between the steps.

    Every parameter gets rank 0's value at creation; buffers do not, see `broadcast`.  The wrapped optimizer makes the
    steps, and has `param_groups`, `state` and all else, so that schedulers work with both.

    Args:
        optimizer: any of `torch.optim`.
        named_parameters: ``model.named_parameters()``, for messages.
        strategy: whose ranks; None for the strategy of this scope or step.
        aggregation: "MEAN" or "SUM".
        wire: the dtype in which gradients travel between nodes, as in `CommunicationOptions`.
        name: is compared between the ranks instead of the call site.

    Raises:
        OptionTypeError, OptionError: for an object that is no optimizer, or is distributed already; for other
            aggregations.
        CollectiveMismatchError: on every rank, when the ranks' parameters differ.
    """

    #: Of a fused optimizer, which would take the factor of a GradScaler from the scaler itself.
    _step_supports_amp_scaling: ClassVar[bool] = False

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
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise OptionTypeError.at(
                _WHERE,
                found=f"optimizer={optimizer!r:.60}",
                expected="an optimizer of torch.optim, which is not distributed yet",
                fix="Make one of the parameters first: DistributedOptimizer(torch.optim.SGD(...)).",
            )
        self.optimizer: torch.optim.Optimizer = optimizer
        self._op = ReduceOp._parse(aggregation, _WHERE)
        if self._op not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise OptionError.at(_WHERE, found=f"aggregation={aggregation!r}", expected="'MEAN' or 'SUM'")
        self._names = {id(tensor): name for name, tensor in named_parameters or ()}
        self._strategy: Strategy = strategy_for(strategy, _WHERE)
        self._options = None if wire is None else CommunicationOptions(wire=wire)
        self._is_synchronized, self._synchronizes, self._steps = False, True, 0
        #: While gradients are combined: hooks of parameters, which notice another backward.
        self._watches: list[Any] = []
        broadcast(dict(self._parameters()), strategy=self._strategy, name=name)
        #: Counts the strategy's optimizers, whose parameters may look alike; the same on all ranks.
        self._number: int = next(self._strategy.extended.communicator.once(_WHERE, itertools.count))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer: its groups, state, defaults, hooks."""
        return getattr(object.__getattribute__(self, "optimizer"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the groups, the state and the defaults are the wrapped optimizer's."""
        object.__setattr__(self.optimizer if name in ("state", "param_groups", "defaults") else self, name, value)

    def _parameters(self) -> list[tuple[str, Any]]:
        """Return the names and tensors of all parameters, each once."""
        tensors = {id(tensor): tensor for group in self.optimizer.param_groups for tensor in group["params"]}
        names = [self._names.get(key, f"parameter {number}") for number, key in enumerate(tensors)]
        return list(zip(names, tensors.values(), strict=True))

    # ------------------------------------------------------------------------------------------------ the steps

    def synchronize(self) -> None:
        """Combine the gradient of every parameter over the ranks.  Collective.

        The next `step` does not do so again; after `zero_grad`, or another backward, it does.

        Raises:
            CollectiveMismatchError: on every rank, when parameters differ, or a rank has left out a step or makes the
                step of another optimizer.
            ShapeError: on every rank, for a gradient whose elements share memory on some rank.
        """
        self._combine_all()
        self._set_combined(True)

    def _set_combined(self, is_combined: bool) -> None:
        """Remember whether the gradients are those of all ranks; the next backward makes them this rank's own."""
        self._is_synchronized = False
        while self._watches:
            self._watches.pop().remove()
        if is_combined:
            self._watches = [
                tensor.register_post_accumulate_grad_hook(self._accumulated)
                for _, tensor in self._parameters()
                if tensor.requires_grad
            ]
            self._is_synchronized = True  # not before: a signal's handler may raise

    def _accumulated(self, parameter: Any) -> None:
        self._is_synchronized = False

    def _combine_all(self) -> None:
        parameters = self._parameters()
        guard, reducer = self._strategy.extended.communicator.guard, self._strategy.extended._reducer
        with (
            t.on_stream(t.gpu_of([tensor for _, tensor in parameters])),
            torch.no_grad(),
            Call(guard, f"{_WHERE}.synchronize", anywhere=True) as call,
        ):
            call.name = f"optimizer {self._number}, step {self._steps}"
            call.structure = ", ".join(f"{name} {tensor.dtype}{list(tensor.shape)}" for name, tensor in parameters)
            own_kinds = np.zeros(len(parameters), np.int8)
            for number, (name, parameter) in enumerate(parameters):
                if parameter.grad is not None:
                    t.checked([parameter.grad], f"{call.where}, the gradient of {name!r}", is_written=True)
                    own_kinds[number] = _SPARSE if parameter.grad.is_sparse else _DENSE
            [kinds] = reducer.all_reduce_arrays(call, ReduceOp.MAX, [own_kinds])
            call.expect_more()
            dense: dict[int, Any] = {}
            for (_, parameter), kind in zip(parameters, kinds, strict=True):
                if kind == _SPARSE:
                    own = parameter.detach()[:0].to_sparse(1) if parameter.grad is None else parameter.grad
                    parameter.grad = t.sum_of_rows(
                        call, reducer, own, parameter.shape, divides=self._op is ReduceOp.MEAN
                    )
                elif kind == _DENSE:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    elif parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_dense()
                    if parameter.numel():
                        dense[parameter.grad.data_ptr()] = parameter.grad.detach()
            wide = [t.flat(t.wide(gradient), gradient.device) for gradient in dense.values()]
            arrays = [t.in_numpy(tensor) if tensor.is_cpu else tensor for tensor in wide]
            if arrays:
                reducer.all_reduce_arrays(call, self._op, arrays, self._options, in_place=True)
            t.write(wide, dense.values())
        self._steps += 1

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` combine no gradients: they are combined, or this rank's own on purpose."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Any = None) -> Any:
        """Combine the gradients unless `synchronize` has done so, and make the optimizer's step.  Collective.

        Args:
            closure: computes the loss and its gradients; it is called with this rank's gradients, which are combined
                after each call, and so is the loss.

        Returns:
            What the optimizer returns.
        """

        def synchronized_closure() -> Any:
            loss = closure()
            self._combine_all()
            with torch.no_grad():
                return all_reduce(loss, self._op, strategy=self._strategy, name="a closure's loss")

        if closure is None and self._synchronizes and not self._is_synchronized:
            self._combine_all()
        result = self.optimizer.step(*([synchronized_closure if self._synchronizes else closure] if closure else []))
        self._set_combined(False)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the optimizer does."""
        self._set_combined(False)
        self.optimizer.zero_grad(set_to_none)

    # --------------------------------------------------------------------------------------- what torch asks for

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which must be equal on all ranks: call `broadcast` on them."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return dict(self.optimizer.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer a state."""
        self.optimizer.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError.at(
            _WHERE,
            found="a copy or a pickle of a distributed optimizer",
            expected="one that works with the ranks of its strategy",
            fix="Make a DistributedOptimizer of a copy of `optimizer.optimizer`, or save optimizer.state_dict().",
        )
