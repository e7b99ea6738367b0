"""A small training run that goes on where the last one ended: what the job scripts beside this file start.

    mpiexec -n 4 python example.py --steps 200

Its state is in the folder checkpoints/, which all nodes must see. Ends with status 0 when all steps are made, and with
75 ("saved; start me again") when a rank was sent SIGUSR2 or SIGTERM before: a batch script sends it when the time is
nearly up.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import mpistrategy as ms


def main() -> None:
    """Train."""
    options = parse_arguments()
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
    # Restores the newest checkpoint. From here on a signal to one rank is enough: all save the step that they are in.
    job = ms.PreemptionCheckpointHandler(manager)

    def train(x: np.ndarray, y: np.ndarray) -> None:
        gradient = 2 * x.T @ (x @ weights - y) / 100
        optimizer.apply_gradients([(gradient, weights)])  # adds the ranks' gradients up
        time.sleep(options.pause)

    first = job.total_run_calls
    say(strategy, f"goes on after step {first}" if first else "begins with step 1")
    for step in range(first + 1, options.steps + 1):
        job.run(strategy.run, train, args=next(batches))  # ends with status 75 if a rank was told to stop
        if step % options.save_every == 0 or step == options.steps:
            manager.save(step)
    say(strategy, f"made all {options.steps} steps: weights {np.round(weights, 2)}")
    manager.close()
    strategy.close()


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
    main()
