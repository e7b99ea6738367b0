"""Every public member that TensorFlow's classes were recorded to have, here with the same parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from conformance.cases import load_cases
from conformance.tensorflow import distribute

import mpistrategy as ms
from mpistrategy.objects.settings import Fixed

pytestmark = pytest.mark.one_rank

RECORDED = {case["program"]: case["outcome"]["observed"] for case in load_cases(only="api_surface/")}
OLD_NAMES = RECORDED["seed_names"]["names"]
SPECIAL = ("__init__", "__deepcopy__", "__copy__", "__enter__", "__exit__")
MEMBERS = [(name, member) for name, members in RECORDED["classes"]["members"].items() for member in members]

#: What is not here, and why.
LEFT_OUT = {
    "cluster_resolver": "TensorFlow's servers; MPI's launcher knows the ranks",
    "configure": "the same",
    "colocate_vars_with": "an alias of strategy.extended.colocate_vars_with, in no document",
    "unwrap": "an alias of experimental_local_results, in no document",
    "group": "groups the operations of a graph, in no document",
    "experimental_make_numpy_dataset": "Dataset.from_arrays; TensorFlow 2 has dropped it",
    "experimental_run_steps_on_iterator": "loops inside a TPU's graph",
}
#: Parameters that are not here, and why.
WITHOUT = {
    "options of run": "RunOptions say how a step is traced into a graph",
    "cluster_resolver of __init__": "TensorFlow's servers",
}
NAMES_LEFT_OUT = {
    "TPUs, parameter servers and other TensorFlow servers": (
        "CentralStorageStrategy", "ParameterServerStrategy", "RunOptions", "Server", "TPUStrategy", "cluster_resolver",
        "coordinator", "partitioners", "rpc",
    ),
    "MirroredStrategy is it": ("MultiWorkerMirroredStrategy",),
    "an old name of CommunicationImplementation": ("CollectiveCommunication",),
    "a module of which all names are here": ("experimental",),
    "of Borg's TPUs; PreemptionCheckpointHandler watches": ("PreemptionWatcher",),
    "how Keras scales losses": ("get_loss_reduction",),
}  # fmt: skip


@pytest.mark.parametrize(("class_name", "member"), MEMBERS, ids=lambda text: text.removeprefix("tf."))
def test_a_recorded_member_is_here(class_name: str, member: str) -> None:
    cls = getattr(distribute, class_name.rpartition(".")[2])
    recorded = RECORDED["classes"]["members"][class_name][member]
    if member in LEFT_OUT and (cls, member) != (ms.StrategyExtended, "colocate_vars_with"):
        assert not hasattr(cls, member), "take it out of LEFT_OUT"
    elif recorded == "property":
        is_field = member in getattr(cls, "__dataclass_fields__", ())
        assert is_field or isinstance(inspect.getattr_static(cls, member), (property, Fixed))
    elif member == "__exit__":  # called by `with` alone, by position
        assert len(inspect.signature(getattr(cls, member)).parameters) == len(recorded.split(","))
    elif "*args" not in recorded:
        check_parameters(inspect.signature(getattr(cls, member)), member, recorded)


def check_parameters(signature: inspect.Signature, member: str, recorded: str) -> None:
    """Every recorded parameter has its name, its place and its default; what is added has a default."""
    ours = dict(signature.parameters)
    for place, (name, default) in enumerate(parameters_of(recorded).items()):
        if f"{name} of {member}" in WITHOUT:
            assert name not in ours
            continue
        found = ours.pop(name)
        if default is inspect.Parameter.empty:  # the axis of reduce has a default here
            assert list(signature.parameters)[place] == name
        else:
            assert repr(found.default) == default
    for parameter in ours.values():
        optional = parameter.default is not inspect.Parameter.empty
        assert optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def parameters_of(recorded: str) -> dict[str, Any]:
    """Return the parameters of a recorded signature with the texts of their defaults."""
    inner = recorded.removeprefix("(").removesuffix(")").replace("()", "<no arguments>")
    parameters: dict[str, Any] = {}
    for text in inner.split(", "):
        name, equals, default = text.partition("=")
        parameters[name] = default.replace("<no arguments>", "()") if equals else inspect.Parameter.empty
    return parameters


@pytest.mark.parametrize("module", sorted(RECORDED["modules"]))
def test_the_names_of_the_modules(module: str) -> None:
    left_out = {name for names in NAMES_LEFT_OUT.values() for name in names}
    missing = {name for name in RECORDED["modules"][module] if not hasattr(ms, name)}
    assert missing <= left_out


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OLD_NAMES.items() for name in names])
def test_every_name_of_the_old_documents_is_here(kind: str, name: str) -> None:
    assert hasattr(getattr(ms, kind), name)
    assert name in SPECIAL or inspect.getdoc(getattr(ms, kind).__dict__.get(name, getattr(getattr(ms, kind), name)))
