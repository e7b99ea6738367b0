"""The gradients of an optimizer's parameters: in memory that the ranks of a node share, summed during backward.

After the first sum each parameter's `grad` is a view of an `Arena`.  On one node the arena is reduced at the end of
backward, where it is; on several nodes bucket by bucket, while backward computes the gradients of earlier layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mpistrategy.arrays.convert import host_array, reducible
from mpistrategy.arrays.foreign import as_kind_of
from mpistrategy.arrays.values import IndexedSlices
from mpistrategy.errors import OptionError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import names_in_words
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction.arena.repeated import RepeatedSum, repeated_sum
from mpistrategy.strategy.current import ReplicaContext
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch.collectives import replica_context
from mpistrategy.training.gradient_buckets import GradientBuckets

WHERE = "DistributedOptimizer"
_SUM = "sum gradients"


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter, as the ranks speak of it."""

    name: str
    tensor: Any

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its gradients, as NumPy's."""
        dtype: np.dtype[Any] = reducible(self.tensor.detach().reshape(-1)[:0], WHERE, self.name).dtype
        return dtype

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.tensor.shape)}"


class Gradients:
    """The gradients of some parameters.

    Args:
        strategy: whose ranks.
        op: SUM or MEAN.
        wire: the dtype between nodes, as in CommunicationOptions.
        bytes_per_bucket: the size of what travels in one piece between nodes.
        names: of parameters, by the ids of their tensors.
    """

    def __init__(
        self, strategy: Strategy, op: ReduceOp, wire: Any, bytes_per_bucket: int, names: Mapping[int, str]
    ) -> None:
        self.strategy: Strategy = strategy
        self._op = op
        self._options = CommunicationOptions(wire=wire)
        self._bytes_per_bucket = bytes_per_bucket
        self._names = names
        self._parameters: list[Parameter] = []
        self._unhooked: list[int] = []
        #: Where the gradients are that are not sparse; by the number of the parameter.
        self._views: dict[int, Any] = {}
        self._position: dict[int, int] = {}
        self._arena: Any = None
        #: What sums the arena where it is, on one node.
        self._repeated: RepeatedSum | None = None
        self._buckets: GradientBuckets | None = None
        #: Parameters whose gradients have changed since the last sum; and those that were summed in this step.
        self._fresh: set[int] = set()
        self._summed: set[int] = set()
        self._sums = self._steps = 0
        self._queued = -1
        #: Whether gradients are summed at the end of backward.
        self.is_syncing = True

    def take_in(self, groups: Sequence[Mapping[str, Any]]) -> list[Parameter]:
        """Take in the parameters of an optimizer's groups that are new, and return them.  All ranks have the same."""
        found: list[Parameter] = []
        known = {id(each.tensor) for each in self._parameters}
        for at, group in enumerate(groups):
            names = group.get("param_names") or [f"parameter {n} of group {at}" for n in range(len(group["params"]))]
            for tensor, name in zip(group["params"], names, strict=True):
                if id(tensor) not in known:
                    found.append(Parameter(self._names.get(id(tensor), name), tensor))
        self._unhooked += range(len(self._parameters), len(self._parameters) + len(found))
        self._parameters += found
        return found

    def sum_rest(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Sum the gradients that have not been summed, those of parameters that are new included.  Collective."""
        if sum([len(group["params"]) for group in groups]) > len(self._parameters):
            self.take_in(groups)
        if self._unhooked:
            self.watch(sum_these=True)
        self.sum()

    def watch(self, *, sum_these: bool) -> None:
        """Watch the parameters that want gradients, also those that were frozen until now.

        Args:
            sum_these: whether a gradient that such a parameter has is one of this step.
        """
        reference = weakref.ref(self)  # torch's hooks are not seen by the garbage collector
        for number in [n for n in self._unhooked if self._parameters[n].tensor.requires_grad]:
            self._unhooked.remove(number)

            def changed(tensor: Any, number: int = number) -> None:
                if (self := reference()) is not None:
                    self._changed(number, tensor)

            tensor = self._parameters[number].tensor
            tensor.register_post_accumulate_grad_hook(changed)
            if sum_these and tensor.grad is not None:
                self._fresh.add(number)

    def step_is_over(self) -> None:
        """Begin the next step: what backward adds from now on belongs to it."""
        self._summed.clear()
        self._sums, self._steps = 0, self._steps + 1

    def _changed(self, number: int, tensor: Any) -> None:
        """Note that backward has written a gradient; move it into the arena."""
        view = self._views.get(number)
        if view is not None and (grad := tensor.grad) is not view and not grad.is_sparse:
            view.copy_(grad.detach() if grad.requires_grad else grad)
            tensor.grad = view
        elif number in self._summed and self._op is ReduceOp.SUM:
            raise OptionError.at(
                WHERE,
                found=f"a backward into the gradient of {self._parameters[number].name!r}, which is a sum already",
                expected="one backward in each step that sums",
                fix="Make the others before it, in `with optimizer.no_sync():`, or use aggregation='MEAN'.",
            )
        self._fresh.add(number)
        if not self.is_syncing:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._queued:  # one that failed never called what it had queued
            torch.autograd.Variable._execution_engine.queue_callback(self.sum)
            self._queued = backward
        if view is not None and self._buckets is not None and self._buckets.starts_early:
            with replica_context(self.strategy, tensor.device):
                self._buckets.ready(self._position[number])

    def sum(self) -> None:
        """Sum the gradients that have changed over the ranks.  Collective."""
        if not self._fresh:
            return
        words, repeated = self._in_words(), self._repeated
        name = f"step {self._steps}, sum {self._sums}: {words}"
        is_sparse = {getattr(self._parameters[number].tensor.grad, "is_sparse", None) for number in self._fresh}
        if repeated and repeated.is_ready and is_sparse == {False} and self._views.keys() >= self._fresh:
            repeated.run((self._steps, self._sums), name, words, partial(self._settle, self._fresh))
        else:
            self._sum_any(name)
        self._summed |= self._fresh
        self._fresh.clear()
        self._sums, self._queued = self._sums + 1, -1

    def _sum_any(self, name: str) -> None:
        """Sum gradients of any kind on any ranks; make an arena for those that have none."""
        guard = self.strategy.extended.communicator.guard
        device = self._parameters[next(iter(self._fresh))].tensor.device
        with (
            replica_context(self.strategy, device) as context,
            torch.no_grad(),
            Call(guard, WHERE, anywhere=True) as call,
        ):
            call.name = name
            sparse = [number for number in sorted(self._fresh) if self._parameters[number].tensor.grad.is_sparse]
            dense = self._fresh - set(sparse)
            self._settle(dense)
            call.agree(_SUM, op=self._op.name)
            call.expect_more()
            if not self._views.keys() >= dense:
                self._arrange(dense)
            if dense:
                assert self._buckets is not None
                if self._buckets._reduced_early(self._op, call) is None:
                    context.all_reduce(self._op, self._arena, self._options)
            for number in sparse:
                self._sum_rows(self._parameters[number], context)

    def _in_words(self) -> str:
        """Return which gradients this rank sums, as the ranks compare it."""
        count = f"gradients of {len(self._fresh)} parameters"
        if len(self._fresh) == len(self._parameters):
            return count
        missing = [each.name for number, each in enumerate(self._parameters) if number not in self._fresh]
        return f"{count}, none of {names_in_words(missing)}"

    def _arrange(self, dense: set[int]) -> None:
        """Make an arena for the gradients that there are, and move them there.  Collective."""
        members = sorted({*self._views, *dense})
        if self._buckets is not None:
            self._buckets.reset()
        chosen = tuple(self._parameters[number] for number in members)
        self._arena = arena = self.strategy.arena([each.tensor.detach() for each in chosen])
        memory = SimpleNamespace(arena=arena, variables=chosen)
        self._buckets = GradientBuckets(memory, self._op, self._bytes_per_bucket, options=self._options)
        self._repeated = None if self._buckets.starts_early else repeated_sum(arena, self._op, _SUM, WHERE)
        self._position = {number: position for position, number in enumerate(members)}
        for number, array, each in zip(members, arena.values, chosen, strict=True):
            view, grad = as_kind_of(array, each.tensor), each.tensor.grad
            self._views[number] = view
            if grad is not None and not grad.is_sparse:
                view.copy_(grad)
                each.tensor.grad = view  # the memory of the gradient before is free now

    def _settle(self, dense: set[int]) -> None:
        """Clear what the arena has of an earlier step; move there what a hook put in the place of a gradient."""
        for number, view in self._views.items():
            tensor = self._parameters[number].tensor
            if tensor.grad is view:
                continue
            if number not in dense:
                view.zero_()
            elif self._buckets and not self._buckets.starts_early:  # else it may be under way
                view.copy_(tensor.grad.detach())
                tensor.grad = view

    def _sum_rows(self, parameter: Parameter, context: ReplicaContext) -> None:
        """Sum a sparse gradient: the rows of all ranks."""
        grad = parameter.tensor.grad.coalesce()
        if grad.sparse_dim() != 1:
            raise UnsupportedError.at(
                WHERE,
                found=f"a gradient of {parameter.name!r} that is sparse in {grad.sparse_dim()} dimensions",
                expected="one whose rows are sparse, as Embedding(sparse=True) makes",
                fix="Make it dense.",
            )
        rows = IndexedSlices(host_array(grad.values()), host_array(grad.indices()[0]), tuple(grad.shape))
        total = context.all_reduce(self._op, rows)
        indices, values = torch.as_tensor(total.indices)[None], torch.as_tensor(total.values)
        found = torch.sparse_coo_tensor(indices, values, grad.shape, device=grad.device, check_invariants=False)
        parameter.tensor.grad = found.coalesce()
