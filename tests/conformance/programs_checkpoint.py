"""Checkpoints of variables: saved, changed, restored, also on another number of replicas; what the programs mean."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import mpistrategy as ms
from mpistrategy.testing import run_replicas

from .environment import Env
from .programs_variables import make_variable, preset
from .registry import program
from .values import Raw, decode, nested

Inputs = dict[str, Any]
#: What the copies were given where there were more replicas than the recorded inputs speak of.
MORE_VALUES = (6.0, 15.0)
COPIES = ("copies before saving", "copies before restoring", "copies after restoring")


@program("checkpoint", copies=COPIES)
def checkpoint(env: Env, p: Inputs) -> Any:
    with env.strategy.scope():
        v = make_variable(p)
    preset(env, v, p)
    with tempfile.TemporaryDirectory() as own:
        folder = env.strategy.extended.communicator.allgather_text(own)[0]  # the ranks save together, in one place
        path = Path(folder) / "ckpt"
        observed: dict[str, Any] = {"copies before saving": env.copies(v)}
        saved = env.attempt(ms.Checkpoint(v=v).save, path)
        if env.failed(saved):
            return {"result": saved}
        observed["value in the file"] = value_in(path)
        with env.strategy.scope():
            v.assign(np.zeros(v.shape, v.dtype))
        observed["copies before restoring"] = env.copies(v)
        restored = env.attempt(ms.Checkpoint(v=v).restore, path)
        if env.failed(restored):
            return {**observed, "result": restored}
        observed["copies after restoring"] = env.copies(v)
        with env.strategy.scope():
            observed["cross-replica read after restoring"] = env.attempt(v.read_value)
        if p.get("restore_outside"):
            with ms.OneDeviceStrategy().scope():  # outside every scope the Checkpoint would belong to all ranks
                w = ms.Variable(decode(p["initial"]))
            outside = env.attempt(ms.Checkpoint(v=w).restore, path)
            observed["a plain variable outside every strategy after restoring"] = outside if env.failed(outside) else w
        env.strategy.barrier("all have read")
        return observed


@program("checkpoint_other_count")
def checkpoint_other_count(env: Env, p: Inputs) -> Any:
    """Saved on some replicas, restored on others: simulated ones, whatever number of ranks this runs on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        values = [*(decode(node) for node in p["preset"]), *MORE_VALUES]

        def save() -> Any:
            strategy = ms.MirroredStrategy()
            with strategy.scope():
                v = make_variable(p)
            if p["synchronization"] == "ON_READ":
                strategy.run(lambda: v.assign(values[strategy.replica_id_in_sync_group]))
            ms.Checkpoint(v=v).save(path)
            return nested(v.local_copy())

        def restore() -> Any:
            strategy = ms.MirroredStrategy()
            with strategy.scope():
                w = make_variable(p)
                ms.Checkpoint(v=w).restore(path)
                return nested(w.local_copy()), w.read_value()

        saved = run_replicas(save, p["save_replicas"])
        restored = run_replicas(restore, p["restore_replicas"])
        return {
            "saved copies": Raw(saved),
            "value in the file": value_in(path),
            "restored copies": Raw([copy for copy, _ in restored]),
            "cross-replica read": restored[0][1],
        }


def value_in(path: Path) -> Any:
    """What is in the file: an array, or a number of NumPy's; of what each rank has for itself, rank 0's."""
    arrays = ms.Checkpoint.arrays(path)
    array = arrays.get("v", arrays.get("v@0"))
    return array if array.ndim else array[()]
