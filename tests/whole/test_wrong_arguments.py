"""Constructors refuse values of a wrong type, name the argument, and take no misspelt attribute later."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy.errors import MpiStrategyError
from mpistrategy.objects.settings import Setting

pytestmark = pytest.mark.one_rank

#: What people construct, and what each argument without a default is given.
CONSTRUCTORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    made.__name__: (made, given)
    for made, given in (
        (ms.MirroredStrategy, {}),
        (ms.OneDeviceStrategy, {"device": "CPU:0"}),
        (ms.MpiAllReduce, {}),
        (ms.NcclAllReduce, {}),
        (ms.HierarchicalCopyAllReduce, {}),
        (ms.OrderedAllReduce, {}),
        (ms.ReductionToOneDevice, {}),
        (ms.CommunicationOptions, {}),
        (ms.Variable, {"initial_value": 1.0}),
        (ms.Dataset.from_arrays, {"arrays": np.zeros((4, 2)), "global_batch_size": 2}),
        (ms.InputContext, {}),
        (ms.CheckpointManager, {}),
        (ms.PreemptionCheckpointHandler, {}),
        (ms.TerminationConfig, {}),
        (ms.optimizers.Optimizer, {"learning_rate": 0.1}),
        (ms.optimizers.SGD, {}),
        (ms.optimizers.Adam, {}),
        (ms.optimizers.AdamW, {}),
        (ms.metrics.Sum, {}),
        (ms.metrics.Mean, {}),
        (ms.metrics.Accuracy, {}),
        (ms.gradients.GradientAccumulator, {"steps": 2}),
    )
}
#: Arguments that take any object, and why; or whose error tells the shapes instead.
ANYTHING = {
    ("MirroredStrategy", "communicator"): "tests of the launch give one",
    ("from_arrays", "arrays"): "its error tells the shapes",
}
SWEEP = [
    (name, argument)
    for name, (made, _) in CONSTRUCTORS.items()
    for argument, parameter in inspect.signature(made).parameters.items()
    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and (name, argument) not in ANYTHING
]


@pytest.mark.parametrize(("name", "argument"), SWEEP)
def test_a_value_of_no_fitting_type_is_refused_by_its_argument(name: str, argument: str, tmp_path: Path) -> None:
    made, given = CONSTRUCTORS[name]
    with ms.OneDeviceStrategy("CPU:0").scope():
        if "directory" in inspect.signature(made).parameters:
            given = {"checkpoint": ms.Checkpoint(x=1), "directory": tmp_path}
        if "checkpoint_dir" in inspect.signature(made).parameters:
            given = {"checkpoint_or_checkpoint_manager": ms.Checkpoint(x=1), "checkpoint_dir": tmp_path}
        with pytest.raises(MpiStrategyError) as refused:
            made(**(given | {argument: object()}))
    assert re.search(rf"\b{argument} ?=|\b{argument}\b.*: found", str(refused.value)), str(refused.value)


#: Attributes that may be set: those with a check, and properties with a setter.
SETTERS = [
    (name, attribute)
    for name, made in [(name, getattr(ms, name, None) or getattr(ms.optimizers, name, None)) for name in CONSTRUCTORS]
    + [("StrategyExtended", ms.StrategyExtended), ("Checkpoint", ms.Checkpoint)]
    if inspect.isclass(made)
    for attribute in sorted({attribute for base in made.__mro__ for attribute in vars(base)})
    if isinstance(setter := inspect.getattr_static(made, attribute), Setting)
    or (isinstance(setter, property) and setter.fset is not None)
]


@pytest.mark.parametrize(("name", "attribute"), SETTERS)
def test_a_setter_refuses_what_no_constructor_would_take(name: str, attribute: str, tmp_path: Path) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope():
        if name == "StrategyExtended":
            made: Any = ms.get_strategy().extended
        elif name == "Checkpoint":
            made = ms.Checkpoint(x=1)
        elif "Checkpoint" in name:
            made = getattr(ms, name)(ms.Checkpoint(x=1), tmp_path)
        else:
            constructor, given = CONSTRUCTORS[name]
            made = constructor(**given)
        before = None if attribute in ("lr", "clipnorm") else getattr(made, attribute)
        with pytest.raises(MpiStrategyError):
            setattr(made, attribute, object())
        assert before is None or getattr(made, attribute) is before
        if hasattr(made, "close"):
            made.close()


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (lambda: ms.optimizers.SGD(aggregation="mena"), "aggregation='mena'.*'mean'"),
        (lambda: ms.optimizers.SGD(nonfinite="rase"), "nonfinite='rase'.*'raise'"),
        (lambda: ms.Variable(0.0, aggregation="menn"), "aggregation='menn'.*'MEAN'"),  # type: ignore[arg-type]
        (lambda: ms.CommunicationOptions(implementation="nccll"), "implementation='nccll'.*'NCCL'"),
        (lambda: ms.get_strategy().make_input_fn_iterator(list, "per-worker"), "mode='per-worker'.*'PER_WORKER'"),
        (lambda: ms.MirroredStrategy(check="alway"), "check='alway'.*'always'"),  # type: ignore[arg-type]
        (lambda: ms.MirroredStrategy(on_error="rase"), "on_error='rase'.*'raise'"),  # type: ignore[arg-type]
        (lambda: ms.MirroredStrategy("gpuu"), "devices='gpuu'.*'gpu'"),
        (lambda: ms.telemetry.RankFilter(others="EROR"), "others='EROR'.*'ERROR'"),
        (lambda: ms.get_strategy().reduce("SMU", 1), "reduce_op='SMU'.*'SUM'"),
        (lambda: ms.ReductionToOneDevice("tusk:0"), "ReductionToOneDevice: found reduce_to_device='tusk:0'"),
        (lambda: ms.get_strategy().extended.reduce_to("SUM", 1, "tusk:0"), "found destinations='tusk:0'"),
        (
            lambda: ms.get_strategy().distribute_dataset([], check_batches="rase"),
            "check_batches='rase'.*'raise'",
        ),
    ],
)
def test_a_misspelt_word_names_the_nearest(make: Callable[[], Any], near: str) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope(), pytest.raises(MpiStrategyError, match=near):
        make()


def test_words_are_taken_in_any_letter_case() -> None:
    ms.telemetry.RankFilter(ranks="ALL", level="info", others="Error")


@pytest.fixture
def manager(tmp_path: Path) -> ms.CheckpointManager:
    with ms.OneDeviceStrategy("CPU:0").scope():
        return ms.CheckpointManager(ms.Checkpoint(x=1), tmp_path)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (ms.optimizers.Adam, (0.1, 0.9, 0.999, 1e-7, "SUM")),
        (ms.optimizers.AdamW, (0.1, 0.01, 0.9, 0.999, 1e-7, "SUM")),
        (ms.Variable, (0.0, True)),
        (ms.Dataset.from_arrays, (np.zeros(4), 2, 7)),
        (ms.MirroredStrategy, (None, None, None)),
        (ms.Strategy.arena, (ms.OneDeviceStrategy(), np.zeros(2), True)),
        (ms.Strategy.reduce, (ms.OneDeviceStrategy(), "SUM", 1.0, None, 2.0)),
    ],
)
def test_the_tail_of_a_signature_has_keywords_only(call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        call(*arguments)


#: Who has an attribute, its name, what it is set to, and what is said.
ATTRIBUTES: list[tuple[Callable[[ms.CheckpointManager], Any], str, Any, str]] = [
    (lambda manager: manager, "keep", 0, "CheckpointManager: found keep=0"),
    (lambda manager: manager, "keep", "3", "CheckpointManager: found keep='3'"),
    (lambda manager: manager, "keep", True, "CheckpointManager: found keep=True"),
    (lambda manager: manager, "keeps", 5, "Did you mean 'keep'"),
    (lambda manager: manager, "directory", "elsewhere", "directory: .* Make another CheckpointManager"),
    (lambda manager: manager, "checkpoint", None, r"CheckpointManager.checkpoint"),
    (lambda manager: manager.checkpoint, "objects", {"_y": 1}, "the name '_y'"),
    (lambda manager: ms.Variable(0.0), "trainable", "no", "trainable='no'"),
    (lambda manager: ms.Variable(0.0), "name", "another", r"Variable.name"),
    (lambda manager: ms.Variable(0.0), "trainabl", 3, "Variable.trainabl: .*Did you mean 'trainable'"),
    (lambda manager: ms.Variable(0.0), "agregation", 3, "Did you mean 'aggregation'"),
    (lambda manager: ms.get_strategy().extended, "option", 3, "Did you mean 'options'"),
    (lambda manager: ms.get_strategy().extended, "cross_device_op", 3, "Did you mean 'cross_device_ops'"),
    (lambda manager: ms.gradients.GradientAccumulator(2), "step", 3, "Did you mean 'steps'"),
    (lambda manager: ms.telemetry.trace("folder"), "directry", 3, "Did you mean 'directory'"),
    (lambda manager: ms.telemetry.trace("folder"), "directory", "another", r"Trace.directory"),
    (lambda manager: ms.get_strategy().arena(np.zeros(2)), "strategy", None, r"Arena.strategy"),
    (lambda manager: ms.optimizers.SGD(0.1), "learning_rat", 0.5, "Did you mean 'learning_rate'"),
    (lambda manager: ms.optimizers.SGD(0.1), "nestrov", True, "Did you mean 'nesterov'"),
    (lambda manager: ms.optimizers.SGD(0.1), "variables", (), "variables"),
    (lambda manager: ms.MpiAllReduce(), "num_packs", 3, "num_packs"),
    (lambda manager: ms.NcclAllReduce(), "num_packs", 3, "num_packs"),
    (lambda manager: ms.HierarchicalCopyAllReduce(2), "num_packs", 3, "num_packs"),
    (lambda manager: ms.OrderedAllReduce(), "num_packs", 3, "num_packs"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "attribute", "value", "words"), ATTRIBUTES)
def test_an_attribute_that_is_misspelt_wrong_or_fixed_is_refused_and_others_are_free(
    manager: ms.CheckpointManager, make: Callable[[Any], Any], attribute: str, value: Any, words: str
) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope():
        made = make(manager)
        before = getattr(made, attribute, None)
        with pytest.raises((MpiStrategyError, AttributeError), match=words):
            setattr(made, attribute, value)
        assert getattr(made, attribute, None) is before
    if isinstance(made, (ms.optimizers.SGD, ms.Variable, ms.gradients.GradientAccumulator)):
        made.comment = "of the program"  # type: ignore[union-attr]


class Warmed(ms.optimizers.SGD):
    """Has attributes of its own; the one that is nearly a setting's has a default."""

    learning_rates: tuple[float, ...] = ()


def test_a_subclass_has_attributes_of_its_own() -> None:
    made = Warmed(0.1)
    made.learning_rates = (0.1, 0.2)
    made.slots = [1]  # type: ignore[attr-defined]
    assert made.learning_rates == (0.1, 0.2)
