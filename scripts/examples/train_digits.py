"""Train a classifier of handwritten digits, data-parallel: one MPI rank is one replica.

    mpiexec -n 4 python scripts/examples/train_digits.py

Every rank computes the gradients of its part of each batch, the library adds them up, and every rank makes the same
step. The numbers are the same, to rounding, on any number of ranks. Succeeds if the test accuracy is at least 0.97; all
ranks end with the same weights, bit for bit, or an error says where they differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mpistrategy as ms

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

HIDDEN, CLASSES, GLOBAL_BATCH, TEST_IMAGES, WANTED_ACCURACY = 128, 10, 64, 360, 0.97


class Network:
    """64 pixels -> 128 hidden units (ReLU) -> 10 classes (softmax), with its gradients written out."""

    def __init__(self, pixels: int) -> None:
        random = np.random.default_rng(0)
        self.weights = [
            ms.Variable(np.sqrt(2 / pixels) * random.standard_normal((pixels, HIDDEN)), name="hidden/weights"),
            ms.Variable(np.zeros(HIDDEN), name="hidden/bias"),
            ms.Variable(np.sqrt(1 / HIDDEN) * random.standard_normal((HIDDEN, CLASSES)), name="output/weights"),
            ms.Variable(np.zeros(CLASSES), name="output/bias"),
        ]

    def forward(self, images: Array) -> tuple[Array, Array]:
        """Return the hidden units and the probabilities of the classes."""
        w1, b1, w2, b2 = (weight[...] for weight in self.weights)
        hidden = np.maximum(images @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return hidden, odds / odds.sum(axis=1, keepdims=True)

    def gradients(self, images: Array, hidden: Array, d_logits: Array) -> list[Array]:
        """Return the derivative of the loss by each of the weights, given that by the logits."""
        d_hidden = (d_logits @ self.weights[2].T) * (hidden > 0)
        return [images.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]


def main() -> None:
    """Train, check and report."""
    options = parse_arguments()
    strategy = ms.MirroredStrategy(options.devices)
    xp = array_module(strategy)

    # Only now that MPI runs: MPICH under srun --mpi=pmi2 may fail to start after such large imports: see
    # `mpistrategy guide slurm`.
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.data[order] / 16, digits.target[order].astype(np.int64)
    test, training = slice(TEST_IMAGES), slice(TEST_IMAGES, None)
    # Shuffled in another order each epoch, the same on any number of ranks; the last batch of an epoch is smaller.
    training_data = ms.Dataset.from_arrays(
        (images[training], labels[training]), GLOBAL_BATCH, shuffle_seed=0, epochs=options.epochs
    )
    test_data = strategy.experimental_distribute_dataset([(images[test], labels[test])])

    with strategy.scope():
        network = Network(images.shape[1])
        optimizer = ms.optimizers.Adam(0.005)
        loss, accuracy = ms.metrics.Mean("loss"), ms.metrics.Accuracy("accuracy")

    def measure(images: Array, labels: Labels) -> tuple[Array, Array]:
        """Add to the metrics, which are this replica's own until they are read; return what the gradients need."""
        hidden, probabilities = network.forward(images)
        loss.update_state(-np.log(probabilities[xp.arange(len(labels)), labels]))
        accuracy.update_state(labels, probabilities)
        return hidden, probabilities

    def training_step(images: Array, labels: Labels) -> None:
        images, labels = xp.asarray(images), xp.asarray(labels)  # to the GPU, if it is one
        hidden, d_logits = measure(images, labels)
        d_logits[xp.arange(len(labels)), labels] -= 1
        # The optimizer adds the replicas' gradients up: each divides by the size of the global batch, not of its part.
        d_logits /= GLOBAL_BATCH
        optimizer.apply_gradients(zip(network.gradients(images, hidden, d_logits), network.weights, strict=True))

    def results() -> tuple[float, float]:
        """Return the loss and the accuracy over all replicas, and start the metrics again."""
        pair = loss.result(), accuracy.result()
        loss.reset_state()
        accuracy.reset_state()
        return pair

    began, history = time.perf_counter(), []
    for epoch in ms.telemetry.progress(range(options.epochs), title="training"):
        for batch in strategy.experimental_distribute_dataset(training_data.epoch(epoch)):
            strategy.run(training_step, args=batch)  # with this rank's part of the batch
        history.append(results())
        if strategy.rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1:3}: loss {history[-1][0]:.12f}, accuracy {history[-1][1]:.4f}", flush=True)
    seconds = time.perf_counter() - began

    for batch in test_data:
        strategy.run(measure, args=tuple(map(xp.asarray, batch)))
    test_loss, test_accuracy = results()
    strategy.assert_mirrored(network.weights)

    if strategy.rank == 0:
        replicas = strategy.num_replicas_in_sync
        print(f"trained {options.epochs} epochs on {replicas} replica{'s' * (replicas > 1)} in {seconds:.1f} s")
        print("weights: identical on all replicas, bit for bit")
        print(f"test: loss {test_loss:.12f}, accuracy {test_accuracy:.4f} (wanted: at least {WANTED_ACCURACY})")
        if options.json:
            report = {"loss": test_loss, "accuracy": test_accuracy, "history": history}
            options.json.write_text(json.dumps(report), encoding="utf-8")
        if options.plot:
            plot(history, test_accuracy, options.plot)
            print(f"plot: {options.plot}", flush=True)
    strategy.close()
    sys.exit(0 if test_accuracy >= WANTED_ACCURACY else 1)


def array_module(strategy: ms.Strategy) -> Any:
    """Return CuPy where this replica drives a GPU, else NumPy."""
    if "GPU" not in strategy.extended.worker_devices[0]:
        return np
    import cupy

    return cupy


def plot(history: list[tuple[float, float]], test_accuracy: float, path: Path) -> None:
    """Draw the loss and the accuracy over the epochs."""
    from matplotlib.figure import Figure  # only the rank that draws needs it

    figure = Figure(figsize=(9, 4), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    epochs = range(1, len(history) + 1)
    loss_axes.semilogy(epochs, [loss for loss, _ in history])
    loss_axes.set(title="training loss (cross entropy)", xlabel="epoch")
    accuracy_axes.plot(epochs, [accuracy for _, accuracy in history], label="training")
    accuracy_axes.axhline(test_accuracy, color="C1", linestyle="--", label=f"test, at the end: {test_accuracy:.4f}")
    accuracy_axes.set(title="accuracy", xlabel="epoch", ylim=(0.8, 1.005))
    accuracy_axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, format="png")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--devices", choices=("cpu", "gpu", "shared", "auto"), default="cpu", help="default: cpu")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where to; default: %(default)s")
    parser.add_argument("--no-plot", dest="plot", action="store_const", const=None, help="draw nothing")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
