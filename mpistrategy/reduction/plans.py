"""The plans of repeated all-reduces: checks, layout and digest are made once for each call site and kind of value.

`Plans` serves ``ctx.all_reduce(op, value)`` and ``ctx.all_reduce(op, value, out=...)`` of ordinary arrays and numbers,
alone or in nests.  It leaves everything else to the general way in `ReplicaContext.all_reduce`, before anything is
sent.  Both ways make the same messages: ranks that go different ways fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrategy.arrays.dtypes import dtype_name, mean_dtype
from mpistrategy.arrays.nest import Leaves, leaves_of, only_text_keys
from mpistrategy.errors import MpiStrategyError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import UNKNOWN, CallTree, Signature, Site, outside
from mpistrategy.mpi.contract.error_messages import BEFORE
from mpistrategy.mpi.contract.guard import Guard
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.objects.jax_traces import in_jax_trace
from mpistrategy.options import CommunicationOptions, ReduceOp, path_word
from mpistrategy.reduction.inputs import Weighted, arrays_of, as_leaf, direct_targets
from mpistrategy.reduction.layout.destinations import EVERY_RANK_TEXT
from mpistrategy.reduction.layout.packing import Layout, layouts_of
from mpistrategy.reduction.plan import Plan, is_simple, plan_of, usual_route
from mpistrategy.reduction.routes.base import Targets
from mpistrategy.reduction.routes.mailboxes import MISFIT, NUMBERS, MailboxRoute, Run, repeated_in_mailboxes
from mpistrategy.reduction.weights import weighted_mean

if TYPE_CHECKING:
    from mpistrategy.reduction.algorithm import Algorithm

WHERE = "ReplicaContext.all_reduce"

_REMEMBERED = 1024
_LONG, _FEW = 64, 8
_ndarray, _CUPY = np.ndarray, ("cupy", "ndarray")
#: What is raised over something that cannot be a key, such as a list that holds itself.
_NO_KEY = (TypeError, RecursionError, MpiStrategyError)

_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


class SitePlans:
    """The plans of one call site.

    Args:
        site: where the calls are made.

    Attributes:
        text: what the ranks compare.
        known: the plans, by operation, kind and layouts.
        kind, op, dtype, shape, names, kinds, is_array, run: the latest all-reduce of one array, one number or a
            dictionary of numbers, and of what: its keys, and the types of the numbers.
    """

    __slots__ = ("dtype", "is_array", "kind", "kinds", "known", "names", "op", "run", "shape", "text")

    def __init__(self, site: Site) -> None:
        self.text: str = site.place
        self.known: dict[Any, Run | None] = {}
        self.kind: type | None = None
        self.is_array: bool = False
        self.op: Any = None
        self.dtype: Any = None
        self.shape: Any = None
        self.names: list[str] | None = None
        self.kinds: list[type] | None = None
        self.run: Run | None = None


class Plans:
    """The plans of one reducer.

    Args:
        communicator: the ranks.
        algorithm: how values are combined; there are plans only where `_has_plans` says so.
        options: of the calls.
        call: what a second thread finds that calls while this one is here; it raises ContextError then.
    """

    #: The algorithm and its options in words, which the ranks compare; None where there are no plans.
    settings: str | None

    def __init__(
        self, communicator: Communicator, algorithm: Algorithm, options: CommunicationOptions, call: Call | None
    ) -> None:
        self._communicator, self._call = communicator, call
        self._guard = communicator.guard
        self._tree = CallTree(SitePlans)
        #: Of calls that are made in another thread, by the text of their call site.
        self._elsewhere: dict[str, SitePlans] = {}
        #: The dtypes and shapes of long lists of arrays.
        self._long: dict[Any, list[_LongLayouts]] = {}
        #: The type of CuPy's arrays, once one of them has a plan.
        self._gpu_array: type | None = None
        self.serve(algorithm, options)
        #: ``run(reduce_op, value, out, frame, step)`` returns the reduction of `value`, or MISFIT before anything
        #: has been sent.  `frame` is the caller's; None where the call was made in another thread, at `guard.site`.
        #: `step` is the code of the step function.
        self.run: Callable[[Any, Any, Any, FrameType | None, Any], Any] = self._runner()

    def serve(self, algorithm: Algorithm, options: CommunicationOptions) -> None:
        """Serve another algorithm, or other options, from now on."""
        served = algorithm._has_plans and options.wire is None
        self._algorithm, self._options = algorithm, options
        self.settings = algorithm._settings(options) if served else None
        self._tree.clear()
        self._elsewhere.clear()
        self._long.clear()

    def _runner(self) -> Callable[[Any, Any, Any, FrameType | None, Any], Any]:
        """Return `run`: a function with all that it needs at hand, since attributes take a tenth of a small sum."""
        guard, find, call, failed = self._guard, self._find, self._call, self._failed
        callers: dict[int, Any] = self._tree.root.callers  # the innermost frames of the places, by instruction
        place_of = self._place_of
        record, append = guard.record, guard.record.entries.append

        def run(reduce_op: Any, value: Any, out: Any, frame: FrameType | None, step: Any) -> Any:
            if guard.current is not None or guard.must_enter or in_jax_trace():
                return MISFIT
            # What `place_of` finds is looked for here, frame by frame, since to call it takes longer than the rest.
            place: SitePlans | None = None
            try:
                caller: Any = frame
                code, node = caller.f_code, callers[caller.f_lasti]
                while node.code is not code:
                    node = node.following
                if code is not step and not node.is_module:
                    caller = caller.f_back
                    code, node = caller.f_code, node.callers[caller.f_lasti]
                    while node.code is not code:
                        node = node.following
                    if code is not step and not node.is_module:
                        caller = caller.f_back
                        code, node = caller.f_code, node.callers[caller.f_lasti]
                        while node.code is not code:
                            node = node.following
                place = node.found
            except (KeyError, AttributeError):  # there is no such node, or no frame, yet
                pass
            if place is None:
                place = place_of(frame, step)
            kind = type(value)
            # Most call sites only ever see one kind of value.
            if kind is not place.kind or reduce_op is not place.op:
                known = find(place, reduce_op, value)
            elif (
                (value.dtype is place.dtype and value.shape == place.shape)
                if place.is_array
                else kind is not dict or ([*value] == place.names and [*map(type, value.values())] == place.kinds)
            ):
                known = place.run
            else:
                known = find(place, reduce_op, value)
            if known is None:
                return MISFIT
            # The record first: the watchdog must not take the collective before for the one that this rank is in.
            record.number = number = record.number + 1
            append((number, known, monotonic(), None))
            try:
                guard.stage, guard.current = BEFORE, call
                result = known(value, out)
            except BaseException as error:
                failed(known, error)
                raise
            finally:
                guard.current = None
            if result is MISFIT:
                record.take_back()
            return result

        return run

    def _place_of(self, frame: FrameType | None, step: Any) -> SitePlans:
        """Return the plans of the call site of `frame`, in a step function with the code `step`.

        A frame of this package, or None, makes none of its own: the call was made elsewhere, at the guard's site.
        """
        site = self._guard.site
        if site is None and outside(frame) is not None:
            return self._tree.find(frame, step)
        site = site or UNKNOWN
        if len(self._elsewhere) >= _REMEMBERED:
            self._elsewhere.clear()
        return self._elsewhere.setdefault(site.place, SitePlans(site))

    def _failed(self, known: Run, error: BaseException) -> None:
        """Tell the other ranks of an error in `known`."""
        guard = self._guard
        if guard.was_told(error):
            guard.clear_told(error)
        elif "in_mailboxes" in known.__dict__ and guard.failures is not None:
            guard.failures.break_off(WHERE, error)  # data and agreement are one
        else:
            guard.fail(WHERE, error)

    def _find(self, place: SitePlans, reduce_op: Any, value: Any) -> Run | None:
        """Return the plan of a value at a call site, made now or before; None for what has no plan."""
        known, kind = place.known, type(value)
        try:
            if kind is np.ndarray:
                key: Any = (reduce_op, value.dtype, value.shape)
            elif kind is dict:
                names = tuple(value)
                key = (reduce_op, names, self._same_layouts((reduce_op, names), value.values()))
            elif kind is list or kind is tuple:
                key = (reduce_op, kind, self._same_layouts((reduce_op, kind), value))
            elif hasattr(kind, "_make_plan"):  # an arena
                known, key = value._plans, (reduce_op, place)
            else:
                key = (reduce_op, kind, _layouts((value.value,)) if kind is Weighted else _layout(value))
            run: Run | None = known.get(key, MISFIT)
        except _NO_KEY:
            return None
        if run is MISFIT:
            run = self._learn(place, key, reduce_op, value)
        is_array = kind is _ndarray or kind is self._gpu_array
        is_named = kind is dict and all(map(NUMBERS.__contains__, map(type, value.values())))
        if run is not None and (is_array or is_named or kind in NUMBERS):
            place.kind, place.is_array, place.op, place.run = kind, is_array, reduce_op, run
            place.dtype, place.shape = getattr(value, "dtype", None), getattr(value, "shape", None)
            place.names, place.kinds = ([*value], [*map(type, value.values())]) if is_named else (None, None)
        return run

    def _same_layouts(self, what: Any, leaves: Any) -> Any:
        """Return what tells leaves apart; of long lists of arrays the object that was returned for the like before.

        To compare a thousand shapes takes less time than to hash them.
        """
        if len(leaves) <= _LONG or not _are_arrays(kinds := {*map(type, leaves)}):
            return _layouts(leaves)
        found = [*map(_dtype_of, leaves)], [*map(_shape_of, leaves)]
        before = self._long.setdefault((what, len(leaves), *kinds), [])
        for layouts in before:
            if layouts.found == found:
                return layouts
        if len(before) >= _FEW:
            before.clear()
        before.append(_LongLayouts(found))
        return before[-1]

    def _learn(self, place: SitePlans, key: Any, reduce_op: Any, value: Any) -> Run | None:
        if len(place.known) >= _REMEMBERED:
            place.known.clear()
            self._long.clear()
        try:
            op = ReduceOp._parse(reduce_op, WHERE)
            if hasattr(value, "_make_plan"):
                served = self.settings is not None
                where, word = (WHERE, place.text), self._word()
                run = value._plans[key] = value._make_plan(op, self._communicator, where, word) if served else None
                return run
            run = self._worked_out(op, value, place.text)
        except MpiStrategyError:
            return None  # the general call raises the error
        place.known[key] = run
        return run

    def _worked_out(self, op: ReduceOp, value: Any, place: str) -> Run | None:
        weighted = type(value) is Weighted
        if weighted:
            value = value.value
        where = leaves_of(value)
        if self.settings is None or where is None or not only_text_keys(value):
            return None
        leaves = where.take(value)
        kinds = {*map(type, leaves)}
        on_gpu = not weighted and kinds != {np.ndarray} and _are_arrays(kinds)
        arrays = leaves if on_gpu or kinds == {np.ndarray} else arrays_of(leaves)
        if arrays is None or not all(is_simple(array.dtype, op) for array in arrays):
            return None

        def signature_of(values: tuple[Any, ...], op: ReduceOp = op) -> Signature:
            settings = self.settings or ""
            return Signature("reduce", op.value, where.text, values, EVERY_RANK_TEXT, settings, "", WHERE, place)

        if on_gpu:
            from mpistrategy.reduction.routes.device_plan import repeated_on_gpu  # here, for the quick import

            num_packs = getattr(self._algorithm, "_num_packs", 0)
            sizes = {"bytes_per_pack": self._options.bytes_per_pack, "num_packs": num_packs}
            (self._gpu_array,) = kinds
            return repeated_on_gpu(self._communicator, where, op, arrays, signature_of, word=self._word(), **sizes)

        def plan_and_signature(op: ReduceOp, layouts: tuple[Layout, ...]) -> tuple[Plan, Signature]:
            values = tuple((dtype_name(dtype), shape) for dtype, shape in layouts)
            plan = plan_of(self._communicator, layouts, op, self._options.bytes_per_pack, usual_route)
            return plan, signature_of(values, op)

        if weighted:
            return weighted_mean(self._communicator, where, op, arrays, plan_and_signature)
        plan, signature = plan_and_signature(op, layouts_of(arrays))
        run = _repeated(plan, self._guard, signature, where, kinds)
        run.__dict__["signature"] = signature  # the flight record keeps it, and may have to say what it does
        return run

    def _word(self) -> str:
        """Return which path is asked for, for arrays in GPU memory."""
        return path_word(self._options, getattr(self._algorithm, "_device_path", ""))


def _repeated(plan: Plan, guard: Guard, signature: Signature, where: Leaves, kinds: set[type]) -> Run:
    """Return a ``run(value, out)``: the whole call for nests of arrays that a plan was made for.

    It returns MISFIT, before anything has been sent, for a `value` or an `out` of another kind.

    Args:
        plan: of the arrays.
        guard: the communicator's.
        signature: of the call.
        where: how to reach the leaves.
        kinds: the types of the leaves.
    """
    route = plan.route
    if isinstance(route, MailboxRoute) and (short := repeated_in_mailboxes(route, guard, signature, where, kinds)):
        short.__dict__["in_mailboxes"] = True
        return short
    digest, nested, only_arrays = guard.digest(signature), not where.single, kinds == {np.ndarray}
    dtypes = [mean_dtype(dtype) if plan.op is ReduceOp.MEAN else dtype for dtype in plan.dtypes]
    some_go_alone = any(len(pack.members) == 1 for pack in route.packs)
    bring, reduce, compare = plan.bring, plan.run, guard.compare_digest

    def run(value: Any, out: Any) -> Any:
        leaves = where.take(value) if nested else (value,)
        arrays = leaves if only_arrays else arrays_of(leaves, plan.layouts)
        if arrays is None:
            return MISFIT
        targets: Targets = None
        if out is not None:
            targets = direct_targets(out, value, where, arrays, dtypes, some_go_alone)
            if targets is None:
                return MISFIT
        bring(arrays, targets)
        compare(digest, signature)
        results: Any = reduce(arrays, targets)
        if out is not None:
            if not nested and results[0] is out:
                return out
            for target, result in zip(where.take(out), results, strict=True):
                if result is not target:
                    target[...] = result
            return out
        if not only_arrays:
            results = [*map(as_leaf, results, leaves)]
        return where.build(results) if nested else results[0]

    return run


def _are_arrays(kinds: set[type]) -> bool:
    """Return whether these types are one, NumPy's or CuPy's arrays."""
    return len(kinds) == 1 and all(kind is _ndarray or (kind.__module__, kind.__name__) == _CUPY for kind in kinds)


class _LongLayouts:
    """The dtypes and the shapes of many arrays; as a key, itself and no other."""

    def __init__(self, found: tuple[list[Any], list[Any]]) -> None:
        self.found = found


def _layouts(leaves: Any) -> tuple[Any, ...]:
    """Return what tells leaves apart: type, dtype and shape."""
    return tuple([(leaf.dtype, leaf.shape) if type(leaf) is np.ndarray else _layout(leaf) for leaf in leaves])


def _layout(leaf: Any) -> Any:
    kind = type(leaf)
    if kind is dict:
        return (kind, tuple(leaf), _layouts(leaf.values()))
    if kind is list or kind is tuple:
        return (kind, _layouts(leaf))
    return kind if kind in NUMBERS else (kind, getattr(leaf, "dtype", None), getattr(leaf, "shape", None))
