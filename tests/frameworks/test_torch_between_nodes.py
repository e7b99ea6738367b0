"""Large reductions between nodes go on in the background: the same results, order and errors."""

from __future__ import annotations

from collections.abc import Callable

import launching
import pytest

torch = pytest.importorskip("torch")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
    pytest.skip("this torch takes no works that are written in Python", allow_module_level=True)
pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.skipif(not launching.LIBRARY.startswith("MPICH"), reason="only MPICH pretends to run on several nodes"),
]

PROGRAM = """
import gc, weakref
import torch, torch.distributed as dist
import mpistrategy as ms, mpistrategy.torch as mst
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

mst.init_process_group(timeout=60)
rank, ranks, nn = dist.get_rank(), dist.get_world_size(), torch.nn


def network():
    torch.manual_seed(0)  # each layer a bucket of 360 KB
    return nn.Sequential(*[nn.Linear(300, 300, bias=False) for _ in range(3)])


def wrapped():
    return nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.3)


def gradients(model, rows):
    model(rows).square().mean().backward()
    return [each.grad for each in model.parameters()]


rows = torch.randn(4 * ranks, 300, generator=torch.Generator().manual_seed(1))
mine, expected, model = rows[4 * rank : 4 * rank + 4], gradients(network(), rows), wrapped()
for _ in range(3):
    model.zero_grad()
    torch.testing.assert_close(gradients(model, mine), expected, rtol=1e-4, atol=1e-7)
hooked = wrapped()
hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
torch.testing.assert_close(gradients(hooked, mine), expected, rtol=1e-1, atol=1e-4)

whole = torch.full((2**17,), rank + 1.0)  # waited for on one rank, made at once on the others
dist.all_reduce(whole, async_op=True).wait() if rank == 0 else dist.all_reduce(whole)
assert (whole == ranks * (ranks + 1) / 2).all()

loss = model(mine).sum()
if rank == 0:
    dist.all_reduce(torch.ones(90_000), async_op=True)  # as the first bucket
try:
    dist.barrier() if rank == 0 else loss.backward()
except ms.errors.CollectiveMismatchError as error:
    print("named" if ":42, reduction 2 of this backward" in str(error) else error, flush=True)
dist.barrier()
works = [dist.all_reduce(torch.ones(90_000 + (rank == 0)), async_op=True) for _ in range(2)]
for work in works[::-1]:  # the one behind a failed one was not made either
    try:
        work.wait()
    except ms.errors.CollectiveMismatchError as error:
        print("typed", flush=True)
torch.testing.assert_close(gradients(wrapped(), mine), expected, rtol=1e-4, atol=1e-7)

# a large message that rank 1 sends before it comes to the reduction
whole, sent = torch.rand(2**18), torch.full((2**20,), float(rank))
pieces = whole.clone()
if rank == 0:
    work = dist.all_reduce(whole, async_op=True)
    dist.recv(sent, 1)
    work.wait()
else:
    dist.send(sent, 0)
    dist.all_reduce(whole)
assert (sent == 1).all()
for piece in pieces.chunk(16):  # not in the background
    dist.all_reduce(piece)
assert torch.equal(whole, pieces)
gc.collect()
gc.disable()  # a large tensor must not stay until the garbage is collected
large = torch.ones(90_000)
kept = weakref.ref(large)
dist.all_reduce(large, async_op=True).wait()
del large
dist.all_reduce(torch.ones(90_000), async_op=True).wait()  # by now the thread is through with the first
assert kept() is None
print("right", flush=True)
"""


@pytest.mark.timeout(130)
def test_the_results_and_errors_of_reductions_in_the_background(launch: Callable[..., launching.Finished]) -> None:
    job = launch(2, PROGRAM, timeout=100, env={"MPIR_CVAR_NUM_CLIQUES": "2"}).check()
    assert sorted(job.stdout.split()) == ["named"] * 2 + ["right"] * 2 + ["typed"] * 4
