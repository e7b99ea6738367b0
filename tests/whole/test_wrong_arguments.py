"""Constructors refuse values of a wrong type, name the argument, and take no misspelt attribute later."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistrategy as ms
from mpistrategy.errors import DeviceError, MpiStrategyError, OptionError
from mpistrategy.mpi.faults import injection
from mpistrategy.objects.settings import Setting, cannot_be_set

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
        (ms.InputOptions, {}),
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
    if (
        isinstance(setter := inspect.getattr_static(made, attribute), Setting)
        and getattr(setter, "_refusal", None) is not cannot_be_set
    )
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


def test_the_sweep_of_setters_is_not_empty() -> None:
    assert {*SETTERS} >= {
        ("SGD", "learning_rate"), ("AdamW", "weight_decay"), ("Variable", "trainable"), ("CheckpointManager", "keep"),
        ("StrategyExtended", "options"), ("ReductionToOneDevice", "accumulation_fn"), ("Checkpoint", "objects"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (lambda: ms.optimizers.SGD(aggregation="mena"), "aggregation='mena'.*'mean'"),
        (lambda: ms.optimizers.SGD(nonfinite="rase"), "nonfinite='rase'.*'raise'"),
        (lambda: ms.Variable(0.0, aggregation="menn"), "aggregation='menn'.*'MEAN'"),  # type: ignore[arg-type]
        (lambda: ms.CommunicationOptions(implementation="nccll"), "implementation='nccll'.*'NCCL'"),
        (lambda: ms.InputOptions(experimental_replication_mode="per-worker"), "mode='per-worker'.*'PER_WORKER'"),
        (lambda: ms.MirroredStrategy(check="alway"), "check='alway'.*'always'"),  # type: ignore[arg-type]
        (lambda: ms.MirroredStrategy(on_error="rase"), "on_error='rase'.*'raise'"),  # type: ignore[arg-type]
        (lambda: ms.MirroredStrategy("gpuu"), "devices='gpuu'.*'gpu'"),
        (lambda: ms.telemetry.RankFilter(others="EROR"), "others='EROR'.*'ERROR'"),
        (lambda: ms.get_strategy().reduce("SMU", 1), "reduce_op='SMU'.*'SUM'"),
        (
            lambda: ms.get_strategy().distribute_dataset([], check_batches="rase"),
            "check_batches='rase'.*'raise'",
        ),
    ],
)
def test_a_misspelt_word_names_the_nearest(make: Callable[[], Any], near: str) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope(), pytest.raises(MpiStrategyError, match=near):
        make()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ms.OneDeviceStrategy("CPUU:0"), "OneDeviceStrategy: found device='CPUU:0'"),
        (lambda: ms.MirroredStrategy(["GPUU:0"]), r"MirroredStrategy: found devices='GPUU:0'"),
        (lambda: ms.ReductionToOneDevice("tusk:0"), "ReductionToOneDevice: found reduce_to_device='tusk:0'"),
        (lambda: ms.get_strategy().extended.reduce_to("SUM", 1, "tusk:0"), "found destinations='tusk:0'"),
    ],
)
def test_a_device_string_is_told_by_its_argument(make: Callable[[], Any], told: str) -> None:
    scope = contextlib.nullcontext() if "Strategy:" in told else ms.OneDeviceStrategy("CPU:0").scope()
    with scope, pytest.raises(DeviceError, match=told):
        make()


def test_words_are_taken_in_any_letter_case() -> None:
    ms.telemetry.RankFilter(ranks="ALL", level="info", others="Error")
    assert injection.parse("RANK=0, At=AllReduce#7, do=Kill", "here") == injection.parse(
        "rank=0, at=allreduce#7, do=kill", "here"
    )


def test_names_of_enumerations_are_taken_in_any_letter_case() -> None:
    assert ms.InputOptions(experimental_replication_mode="per_replica") == ms.InputOptions(
        experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA
    )


@pytest.fixture
def manager(tmp_path: Path) -> ms.CheckpointManager:
    with ms.OneDeviceStrategy("CPU:0").scope():
        return ms.CheckpointManager(ms.Checkpoint(x=1), tmp_path)


def test_settings_of_a_manager_are_checked_later_too(manager: ms.CheckpointManager) -> None:
    manager.keep = 5
    for wrong in (0, "3", 2.5, True):
        with pytest.raises(MpiStrategyError, match=f"CheckpointManager: found keep={wrong!r}"):
            manager.keep = wrong
    assert manager.keep == 5
    with pytest.raises(OptionError, match=r"CheckpointManager.directory: .* Make another CheckpointManager"):
        manager.directory = "elsewhere"
    with pytest.raises(OptionError, match=r"CheckpointManager.checkpoint"):
        manager.checkpoint = ms.Checkpoint(y=1)


def test_the_objects_of_a_checkpoint_are_checked_later_too(tmp_path: Path) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope():
        checkpoint = ms.Checkpoint(x=1)
    with pytest.raises(OptionError, match="the name '_y'"):
        checkpoint.objects = {"_y": 1}
    checkpoint.objects["a/b"] = 1
    with pytest.raises(OptionError, match="the name 'a/b'"):
        checkpoint.save(tmp_path / "bad")


def test_a_trainable_of_a_variable_is_a_bool() -> None:
    with ms.OneDeviceStrategy("CPU:0").scope():
        variable = ms.Variable(0.0, name="w")
    variable.trainable = False
    with pytest.raises(MpiStrategyError, match="trainable='no'"):
        variable.trainable = "no"
    with pytest.raises(OptionError, match=r"Variable.name"):
        variable.name = "another"
    assert (variable.trainable, variable.name) == (False, "w")


class Warmed(ms.optimizers.SGD):
    """Has attributes of its own; the one that is nearly a setting's is declared."""

    learning_rates: list[float]

    def __init__(self) -> None:
        super().__init__(0.1)
        self.learning_rates, self.warmup = [0.1, 0.2], 3
        self.slots, self.updates, self.rate_decay = [1], 2, 0.5


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


def test_a_misspelt_attribute_is_refused_and_others_are_free(manager: ms.CheckpointManager) -> None:
    optimizer = ms.optimizers.SGD(0.1)
    with pytest.raises(OptionError, match="Did you mean 'learning_rate'"):
        optimizer.learning_rat = 0.5  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="Did you mean 'nesterov'"):
        optimizer.nestrov = True  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="Did you mean 'keep'"):
        manager.keeps = 5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        optimizer.variables = ()  # type: ignore[misc]
    optimizer.comment = "mine"  # type: ignore[attr-defined]
    assert Warmed().learning_rates == [0.1, 0.2]


def test_misspelt_attributes_of_variables_strategies_and_helpers_are_refused(tmp_path: Path) -> None:
    strategy = ms.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        variable, accumulator = ms.Variable(0.0), ms.gradients.GradientAccumulator(2)
        handler = ms.PreemptionCheckpointHandler(ms.Checkpoint(x=1), tmp_path)
    handler.close()
    for made, wrong, right in (
        (variable, "trainabl", "trainable"),
        (variable, "agregation", "aggregation"),
        (strategy.extended, "option", "options"),
        (strategy.extended, "cross_device_op", "cross_device_ops"),
        (accumulator, "step", "steps"),
        (handler, "checkpoint_maneger", "checkpoint_manager"),
        (ms.telemetry.trace("folder"), "directry", "directory"),
    ):
        with pytest.raises(OptionError, match=f"{type(made).__name__}.{wrong}: .*Did you mean {right!r}"):
            setattr(made, wrong, 3)
        made.comment = "mine"  # type: ignore[union-attr]


def test_what_the_constructor_would_refuse_is_refused_later() -> None:
    for algorithm in (ms.MpiAllReduce(), ms.NcclAllReduce(), ms.HierarchicalCopyAllReduce(2), ms.OrderedAllReduce()):
        with pytest.raises(AttributeError, match="num_packs"):
            algorithm.num_packs = 3  # type: ignore[misc]
    trace = ms.telemetry.trace("folder")
    with pytest.raises(OptionError, match=r"Trace.directory"):
        trace.directory = "another"
    assert trace.directory == "folder"
    arena = ms.OneDeviceStrategy().arena(np.zeros(2))
    with pytest.raises(OptionError, match=r"Arena.strategy"):
        arena.strategy = ms.OneDeviceStrategy()
