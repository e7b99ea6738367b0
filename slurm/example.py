"""A small training run that goes on where the last one ended: what the job scripts beside this file start.

    mpiexec -n 4 python example.py --steps 200

Its state is in the folder checkpoints/, which all nodes must see. Ends with status 0 when all steps are made, and with
75 ("saved; start me again") when a rank was sent SIGUSR2 before: a batch script sends it when the time is nearly up.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

import numpy as np

import mpistrategy as ms

START_ME_AGAIN = 75


def main() -> int:
    """Train; return the exit status."""
    options = parse_arguments()
    signals: list[int] = []  # a handler must do no more than take a note: saving in it would meet half-made steps
    signal.signal(signal.SIGUSR2, lambda number, frame: signals.append(number))

    strategy = ms.MirroredStrategy()  # one replica on every rank; starts MPI
    rows = np.random.default_rng(options.seed).standard_normal((1000, 3))
    arrays = (rows, rows @ [1.0, -2.0, 3.0])
    data = ms.Dataset.from_arrays(arrays, global_batch_size=100, shuffle_seed=options.seed, epochs=None)
    batches = iter(strategy.experimental_distribute_dataset(data))
    with strategy.scope():  # what is made here has a copy on every rank
        weights = ms.Variable(np.zeros(3))
        optimizer = ms.optimizers.Adam(options.rate)
    checkpoint = ms.Checkpoint(weights=weights, optimizer=optimizer, batches=batches)
    manager = ms.CheckpointManager(checkpoint, options.folder, keep=2)

    def train(x: np.ndarray, y: np.ndarray) -> None:
        gradient = 2 * x.T @ (x @ weights - y) / 100
        optimizer.apply_gradients([(gradient, weights)])  # adds the ranks' gradients up

    first = manager.restore() or 0
    say(strategy, f"goes on after step {first}" if first else "begins with step 1")
    told = False
    for step in range(first + 1, options.steps + 1):
        strategy.run(train, args=next(batches))
        time.sleep(options.pause)
        # One rank that was sent the signal is enough, and all of them stop after the same step.
        told = strategy.reduce("MAX", np.float64(len(signals)), axis=None) > 0
        if told or step % options.save_every == 0 or step == options.steps:
            manager.save(step)
        if told and step < options.steps:
            say(strategy, f"was told to stop, and saved step {step}")
            break
    else:
        told = False
        say(strategy, f"made all {options.steps} steps: weights {np.round(weights, 2)}")
    manager.close()
    strategy.close()
    return START_ME_AGAIN if told else 0


def say(strategy: ms.Strategy, text: str) -> None:
    """Print on one rank only."""
    if strategy.replica_id_in_sync_group == 0:
        print(f"example.py on {strategy.num_replicas_in_sync} ranks: {text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=50, help="steps; default: %(default)s")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the data; default: %(default)s")
    parser.add_argument("--folder", default="checkpoints", help="default: %(default)s")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to make it last")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
