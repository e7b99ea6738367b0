"""Where an optimizer's gradients can lie, so that a step need not copy them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpistrategy.mpi.contract.call import Call
from mpistrategy.options import ReduceOp
from mpistrategy.strategy.current import get_strategy
from mpistrategy.training.checks import check_variable, checked_count
from mpistrategy.training.gradient_buckets import DEFAULT_BYTES_PER_BUCKET, GradientBuckets
from mpistrategy.training.sliced_step import GradientArena, SlicedSteps
from mpistrategy.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrategy.reduction.arena.arena import Arena


class GradientPlaces:
    """The part of Optimizer that makes memory for gradients."""

    aggregation: ReduceOp
    _sliced: SlicedSteps

    def gradient_arena(self, variables: Iterable[Variable]) -> Arena:
        """Return an arena for the gradients of `variables`: gradients written there need no copy.  Collective.

        Write them in place (``np.matmul(x.T, d, out=arena.values[0])``) and give `apply_gradients` pairs of
        ``arena.values[i]`` and the i-th variable.  They stay as they are: the reduction goes elsewhere.

        Args:
            variables: variables of one strategy.  For the same ones in the same order it is always the same arena.

        Returns:
            An Arena whose `values` are a list like the variables.

        Raises:
            EmptyBatchError: without variables.
            OptionError: for what is no variable, and for variables of several strategies.
        """
        return self._gradients_of(variables, "gradient_arena").arena

    def gradient_buckets(
        self, variables: Iterable[Variable], bytes_per_bucket: int = DEFAULT_BYTES_PER_BUCKET
    ) -> GradientBuckets:
        """Return the gradient arena of `variables` in buckets, whose reduction overlaps with computation.  Collective.

        Args:
            variables: as in `gradient_arena`; in the order of the model's layers.
            bytes_per_bucket: how many bytes of gradients are reduced in one piece.

        Returns:
            GradientBuckets, to be given to `apply_gradients` in place of pairs.

        Raises:
            OptionError, OptionTypeError: for a number of bytes that is no int from 1 on; else as `gradient_arena`.
        """
        checked_count(f"{type(self).__name__}.gradient_buckets", "bytes_per_bucket", bytes_per_bucket)
        return GradientBuckets(
            self._gradients_of(variables, "gradient_buckets", f"{bytes_per_bucket=}"),
            self.aggregation,
            bytes_per_bucket,
        )

    def _gradients_of(self, variables: Iterable[Variable], method: str, options: str = "") -> GradientArena:
        where = f"{type(self).__name__}.{method}"
        listed: tuple[Any, ...] = tuple(variables)
        strategy = next((var.strategy for var in listed if isinstance(var, Variable)), None) or get_strategy()
        with Call(strategy.extended.communicator.guard, where) as call:
            for var in listed:
                check_variable(var, strategy, where)
            call.structure = ", ".join(var.key for var in listed)
            call.agree("place gradients", op=self.aggregation.value, options=options)
            return self._sliced.arena(strategy, listed)
