"""Conjugate gradients for a Laplacian of which each rank has some rows: two dot products an iteration over all ranks.

    mpiexec -n 2 python scripts/examples/conjugate_gradient.py [ROWS [ITERATIONS]]

Rank 0 prints the residual, and how long an iteration takes when the dot products go by `strategy.reduce`, and when they
go by mpi4py's `Allreduce`: medians of the rounds, which alternate.
"""

import sys
import time
from statistics import median

import numpy as np
from mpi4py import MPI

import mpistrategy as ms

comm = MPI.COMM_WORLD
strategy = ms.MirroredStrategy(communicator=comm)
rows = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
iterations = int(sys.argv[2]) if len(sys.argv) > 2 else 100
first, last = rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size
above = comm.rank - 1 if comm.rank else MPI.PROC_NULL
below = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL


def times_laplacian(x):
    """Return this rank's rows of the Laplacian times x; one row more from each neighbour."""
    wide = np.zeros(x.size + 2)
    wide[1:-1] = x
    comm.Sendrecv(x[:1], above, recvbuf=wide[-1:], source=below)
    comm.Sendrecv(x[-1:], below, recvbuf=wide[:1], source=above)
    return 2.1 * x - wide[:-2] - wide[2:]


def by_strategy(x, y):
    """Return the dot product over all ranks; the same bits on each."""
    return float(strategy.reduce("SUM", x @ y))


def by_mpi4py(x, y):
    """Do the same without the library."""
    total = np.empty(1)
    comm.Allreduce(np.array([x @ y]), total)
    return float(total[0])


def solve(dot):
    """Return this rank's rows of the solution of A x = 1, and the norm of the residual."""
    x, r = np.zeros(last - first), np.ones(last - first)
    p, old = r.copy(), dot(r, r)
    for _ in range(iterations):
        a_p = times_laplacian(p)
        step = old / dot(p, a_p)
        x += step * p
        r -= step * a_p
        new = dot(r, r)
        p = r + new / old * p
        old = new
    return x, old**0.5


seconds = {by_strategy: [], by_mpi4py: []}
for _ in range(7):
    for dot, times in seconds.items():
        comm.Barrier()
        began = time.perf_counter()
        x, norm = solve(dot)
        times.append((time.perf_counter() - began) / iterations)
solution = strategy.gather(x, axis=0)
if comm.rank == 0:
    print(
        f"{iterations} iterations on {comm.size} ranks: residual {norm:.3g}, x[{rows // 2}] = {solution[rows // 2]:.9f}"
    )
    for dot, times in seconds.items():
        print(f"{dot.__name__}: {median(times) * 1e6:.1f} us an iteration")
strategy.close()
