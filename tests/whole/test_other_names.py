"""What TensorFlow users write first is answered with the name or keyword to write here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest

import mpistrategy as ms
from mpistrategy.objects import other_names

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("name", other_names.MODULE)
def test_a_name_of_tensorflows_says_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. {other_names.MODULE[name][:20]}"):
        getattr(ms, name)
    assert name not in dir(ms)
    assert not hasattr(ms, name)


def test_other_unknown_names_are_ordinary_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Varable'") as unknown:
        _ = ms.Varable
    assert unknown.value.name == "Varable"  # for Python's own suggestion
    assert ms.CollectiveHints is ms.CommunicationOptions
    assert "CollectiveHints" not in dir(ms)


OWNERS: dict[str, Any] = {
    "Strategy": ms.Strategy,
    "Optimizer": ms.optimizers.SGD,
    "_Metric": ms.metrics.Mean,
    "Dataset": ms.Dataset,
    "CheckpointManager": ms.CheckpointManager,
    "Checkpoint": ms.Checkpoint,
}


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in other_names.OF_CLASS.items() for name in names]
)
def test_an_attribute_of_tensorflows_says_what_to_write(owner: str, name: str) -> None:
    kind = OWNERS[owner]
    assert not hasattr(kind, name), "it is here: take it out of the table"
    made = object.__new__(kind)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. "):
        getattr(made, name)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda folder: ms.CheckpointManager(ms.Checkpoint(), folder, max_to_keep=3), "max_to_keep=3.*Write keep"),
        (lambda folder: ms.Dataset.from_arrays(np.ones(4), batch_size=2), "batch_size=2.*Write global_batch_size"),
        (lambda folder: ms.Dataset.from_arrays(np.ones(4), 2, shuffle=True), "Write shuffle_seed"),
        (lambda folder: ms.metrics.Mean(dtype="float32"), "metrics add in float64"),
        (lambda folder: ms.metrics.Mean().update_state(1.0, sample_weight=2.0), "Write weight"),
        (lambda folder: ms.metrics.Accuracy().update_state(y_true=[1], y_pred=[1]), "Write labels"),
        (lambda folder: ms.MirroredStrategy(cluster_resolver=None), "mpiexec or srun"),
        (lambda folder: ms.optimizers.SGD(clipvalue=1.0), "np.clip"),
        (lambda folder: ms.optimizers.Adam(lr=1.0), "Write learning_rate"),
        (lambda folder: ms.optimizers.Adam(amsgrad=True), "Derive a class"),
    ],
)
def test_a_keyword_of_tensorflows_says_what_to_write(call: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    with ms.OneDeviceStrategy("CPU:0").scope(), pytest.raises(TypeError, match=told):
        call(tmp_path)


#: What Horovod 0.28.1 imports into horovod.torch.
HOROVOD = """
Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
broadcast_optimizer_state broadcast_parameters ccl_built check_extension cross_rank cross_size cuda_built ddl_built
elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async
init is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank
reducescatter reducescatter_async remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline
stop_timeline synchronize
"""


def test_the_guide_has_every_name_of_horovods() -> None:
    _, _, table = pages.TEXTS["horovod"].partition("## Every name of horovod.torch")
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n## ")[0], flags=re.MULTILINE)
    assert sorted(re.findall("`(.*?)`", " ".join(rows))) == sorted(HOROVOD.split())


def is_public(name: str) -> bool:
    """Return whether a dotted name is in the package; a class has what instances have, too."""
    found: Any = ms
    getattr(ms, name.partition(".")[0], None)  # some names are loaded when they are first used
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    return found is not None


def test_the_names_in_the_tables_of_the_page_are_those_of_the_package() -> None:
    page = pages.TEXTS["tensorflow"]

    def names_in(text: str) -> list[str]:
        return re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", text)

    rows = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ") and "| here |" not in row]
    here = names_in("".join(rows) + page.partition("## Not in tf.distribute\n")[2])
    missing = names_in(page.partition("## Not there\n")[2].partition("\n## ")[0].partition("Write `")[0])
    assert len(here) > 34
    assert missing
    assert [name for name in here if not is_public(name)] == []
    assert [name for name in missing if is_public(name)] == []
