"""TensorFlow's MultiWorkerMirroredStrategy, one worker a rank, on CPUs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from libraries import Start, TrainingStep
from mpistrategy.arrays.dtypes import Array
from mpistrategy.cli.bench.case import Variant
from mpistrategy.cli.bench.raw import RawRanks

PACKAGE = "tensorflow"


class MultiWorker:
    """Sums of TensorFlow's own tensors in a tf.function: bringing NumPy's arrays there is not counted."""

    def __init__(self, ranks: RawRanks, nodes: int) -> None:
        host = socket.gethostbyname(socket.gethostname()) if nodes > 1 else "127.0.0.1"
        with socket.socket() as chosen:
            chosen.bind((host, 0))
            mine = f"{host}:{chosen.getsockname()[1]}"
        workers = [ranks.broadcast_text(mine, root) for root in range(ranks.size)]
        task = {"type": "worker", "index": ranks.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        self.tf = tf
        self.name = f"tensorflow {tf.__version__} MultiWorkerMirroredStrategy"
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def one_array(self, array: Array) -> Iterator[Variant]:
        """Yield an all_reduce of one tensor in strategy.run."""
        yield self._variant([array])

    def gradients(self, arrays: Sequence[Array]) -> Iterator[Variant]:
        """Yield an all_reduce of the list of tensors in strategy.run."""
        yield self._variant(arrays)

    def training_steps(
        self, parameters: Sequence[Array], inputs: Array, classes: Array, rate: float
    ) -> Iterator[TrainingStep]:
        """Yield nothing."""
        yield from ()

    def _variant(self, arrays: Sequence[Array]) -> Variant:
        tf = self.tf
        held: list[Any] = []

        def load() -> None:
            held[:] = [tf.constant(array) for array in arrays]

        def in_replica(tensors: Any) -> Any:
            tensors = [tf.identity(tensor) for tensor in tensors]  # on the replica's device; no copy
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

        step = tf.function(lambda tensors: self._strategy.run(in_replica, args=(tensors,)))

        def call() -> Any:
            return [tensor.numpy() for tensor in step(held)]  # waits; no copy on CPUs

        return Variant(self.name, call, arrays, load=load)

    def close(self) -> None:
        """TensorFlow ends its servers with the process."""


PEER: Start = MultiWorker
