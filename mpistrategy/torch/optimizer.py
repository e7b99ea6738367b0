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
from mpistrategy.reduction.plan import in_place_targets
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.reduction.transfer import layouts_of
from mpistrategy.strategy.current import strategy_for
from mpistrategy.strategy.replica_context import ReplicaContext
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch import tensors as t
from mpistrategy.torch.collectives import all_reduce
from mpistrategy.torch.starts import broadcast

_WHERE = "DistributedOptimizer"
#: The kind of a parameter's gradient on a rank; the greatest kind of all ranks decides.
_NONE, _SPARSE, _DENSE = 0, 1, 2


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
            aggregations; for names that are not unique.
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
        pairs = list(named_parameters or ())
        if len(dict(pairs)) < len(pairs):
            raise OptionError.at(
                _WHERE,
                found=f"names {[name for name, _ in pairs]!r:.200}",
                expected="a name of its own for each parameter",
            )
        self._names = {id(tensor): name for name, tensor in pairs}
        self._strategy: Strategy = strategy_for(strategy, _WHERE)
        self._options = CommunicationOptions(wire=wire)
        self._is_synchronized, self._synchronizes, self._steps = False, True, 0
        #: While gradients are combined: hooks of parameters, which notice another backward.
        self._watches: list[Any] = []
        broadcast(dict(self._parameters()), strategy=self._strategy, name=name)
        #: Counts the strategy's optimizers, whose parameters may look alike; the same on all ranks.
        self._number: int = next(self._strategy.extended.communicator.once(_WHERE, itertools.count))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer: its groups, state, defaults, hooks."""
        return getattr(object.__getattribute__(self, "optimizer"), name)

    def _parameters(self) -> list[tuple[str, Any]]:
        """Return the names and tensors of all parameters, each once."""
        parameters = {
            id(tensor): (self._names.get(id(tensor), f"parameter {number} of group {at}"), tensor)
            for at, group in enumerate(self.optimizer.param_groups)
            for number, tensor in enumerate(group["params"])
        }
        return list(parameters.values())

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
            watched = [tensor for _, tensor in self._parameters() if tensor.requires_grad]
            self._watches = [tensor.register_post_accumulate_grad_hook(self._accumulated) for tensor in watched]
            self._is_synchronized = True  # not before: a signal's handler may raise

    def _accumulated(self, parameter: Any) -> None:
        self._is_synchronized = False

    def _combine_all(self) -> None:
        parameters = self._parameters()
        guard, reducer = self._strategy.extended.communicator.guard, self._strategy.extended._reducer
        with (
            t.on_stream(t.gpu_of([tensor for _, tensor in parameters])),
            ReplicaContext(self._strategy, self._strategy.rank) as context,
            torch.no_grad(),
            Call(guard, f"{_WHERE}.synchronize", anywhere=True) as call,
        ):
            call.name = f"optimizer {self._number}, step {self._steps}"
            call.structure = ", ".join(f"{name} {tensor.dtype}{list(tensor.shape)}" for name, tensor in parameters)
            own_kinds = np.array([_kind(*parameter) for parameter in parameters], np.int8)
            [kinds] = reducer.all_reduce_arrays(call, ReduceOp.MAX, [own_kinds])
            call.expect_more()
            dense: dict[int, Any] = {}
            for (_, parameter), kind in zip(parameters, kinds, strict=True):
                if kind == _SPARSE:
                    parameter.grad = _combined_rows(parameter, self._op, context)
                elif kind == _DENSE:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    elif parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_dense()
                    dense[parameter.grad.data_ptr()] = parameter.grad.detach()
            self._combine(call, [gradient for gradient in dense.values() if gradient.numel()], context, reducer)
        self._steps += 1

    def _combine(self, call: Call, gradients: list[Any], context: ReplicaContext, reducer: Reducer) -> None:
        """Write the combined gradients into the existing tensors."""
        if not gradients:
            return
        wide = [_wide(gradient) for gradient in gradients]
        arrays = [t.in_numpy(tensor) for tensor in wide if tensor.is_cpu and self._options.wire is None]
        plan = None if len(arrays) < len(wide) else reducer.plan_of_arrays(self._op, layouts_of(arrays))
        if plan is None:
            context.all_reduce(self._op, wide, self._options, out=wide)
        else:
            totals = plan.run(call, arrays, in_place_targets(plan.plan, arrays))
            for array, total in zip(arrays, totals, strict=True):
                array[...] = total  # nothing to do where it is the array
        t.write(wide, gradients)

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
                after each call, and the loss is the mean over the ranks.

        Returns:
            What the optimizer returns.
        """

        def synchronized_closure() -> Any:
            loss = closure()
            self._combine_all()
            if loss is None:
                return None
            value = loss.detach() if isinstance(loss, torch.Tensor) else loss
            return all_reduce(value, strategy=self._strategy, name="a closure's loss")

        if closure is None and self._synchronizes and not self._is_synchronized:
            self._combine_all()
        result = self.optimizer.step(*([synchronized_closure] if closure else []))
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


def _kind(name: str, parameter: Any) -> int:
    """Return which kind of gradient this rank has of a parameter; raise for a gradient that cannot be written."""
    if parameter.grad is None:
        return _NONE
    t.checked([parameter.grad], f"{_WHERE}.synchronize, the gradient of {name!r}", is_written=True)
    return _SPARSE if parameter.grad.is_sparse else _DENSE


def _wide(tensor: Any) -> Any:
    """Return a tensor whose memory has its values, in a dtype in which sums are exact enough; usually the tensor."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain.to(t.WIDER.get(tensor.dtype, tensor.dtype))


def _combined_rows(parameter: Any, op: ReduceOp, context: ReplicaContext) -> Any:
    """Return a sparse gradient: the rows of all ranks."""
    grad = parameter.detach()[:0].to_sparse(1) if parameter.grad is None else parameter.grad
    own_rows = grad.coalesce()
    own_places = own_rows.indices().t().contiguous()
    places, values = context.all_gather([own_places, _wide(own_rows.values())], 0)
    total = torch.sparse_coo_tensor(  # without checks of the indices, and saying so: else torch warns of them
        places.t(), values, parameter.shape, device=values.device, check_invariants=False
    ).coalesce()
    if op is ReduceOp.MEAN:
        total = total / context.num_replicas_in_sync
    return total.to(grad.dtype)
