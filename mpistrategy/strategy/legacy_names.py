"""Strategy's methods of TensorFlow 1, and how a strategy is copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

from mpistrategy.errors import CopyError, OptionTypeError
from mpistrategy.objects.copies import NotPickled

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mpistrategy.input.iterators import DistributedIterator

T = TypeVar("T")


class _Strategy(Protocol):
    def scope(self) -> AbstractContextManager[Any]: ...

    def run(self, fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T: ...


class OldNames(NotPickled):
    """The part of Strategy that is kept for programs written for TensorFlow 1."""

    _is_default: bool
    _instead_of_pickling = (
        "Send arrays, such as np.asarray(variable), or the name of a Checkpoint, and make what is needed there."
    )

    def experimental_run_v2(
        self: _Strategy, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Return `run(fn, args, kwargs)`: its old name."""
        return self.run(fn, args, {} if kwargs is None else kwargs)

    def experimental_run(
        self: _Strategy, fn: Callable[..., T], input_iterator: DistributedIterator[Any] | None = None
    ) -> T:
        """Run ``fn(element)`` on every replica, with this rank's next element of `input_iterator`.

        Args:
            fn: the step function; without an iterator it is called without arguments.
            input_iterator: what `make_dataset_iterator` or `make_input_fn_iterator` returned.

        Raises:
            OutOfRangeError: after the iterator's last element.
            ContextError, OptionTypeError: as `run`.
        """
        if input_iterator is None:
            return self.run(fn, (), {})
        if not hasattr(input_iterator, "get_next"):
            raise OptionTypeError.at(
                "Strategy.experimental_run",
                found=f"input_iterator={input_iterator!r}",
                expected="an iterator with get_next()",
                fix="Pass what make_dataset_iterator(dataset) returns.",
            )
        with self.scope():
            element = input_iterator.get_next()
        return self.run(fn, (element,), {})

    def experimental_initialize(self) -> list[Any]:
        """Return an empty list: nothing must run before the first step."""
        return []

    def experimental_finalize(self) -> list[Any]:
        """Return an empty list: nothing must run after the last step."""
        return []

    def update_config_proto(self, config_proto: T) -> T:
        """Return a shallow copy of `config_proto`: a new object with the same attributes, unchanged.

        TensorFlow fits the configuration of its sessions to the strategy here; there is no session to configure.
        """
        return copy.copy(config_proto)

    def __copy__(self) -> NoReturn:
        raise CopyError.at(
            "copy.copy(strategy)",
            found="a shallow copy",
            expected="one strategy for each set of variables",
            fix="Use the strategy itself, or copy.deepcopy(strategy).",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a strategy of its own with the same ranks: the copy shares the communicator, and its close().

        Variables of the original are not the copy's.

        Raises:
            CopyError: for the default strategy, of which there is one.
        """
        if self._is_default:
            raise CopyError.at("copy.deepcopy(strategy)", found="the default strategy", expected="another strategy")
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for name, value in vars(self).items():
            belongs_to_self = hasattr(value, "_copy_for")
            setattr(result, name, value._copy_for(result) if belongs_to_self else copy.deepcopy(value, memo))
        return result
