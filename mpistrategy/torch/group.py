"""The collectives of torch.distributed over the ranks of a communicator.

Each call is compared between the ranks before data move: its kind, operation, dtype, numbers of elements and root.  The
line of the program is reported and not compared, since ranks of torch programs make one call at several lines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.futures import Future

from mpistrategy.errors import OptionError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.over_mpi.collectives import GREATEST_TAG, Message
from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator
from mpistrategy.torch import tensors as t


def _completed(result: Any) -> Any:
    """Return a future that holds a result."""
    future: Any = Future()
    future.set_result(result)
    return future


def done(result: Any) -> Any:
    """Return the work of a call that is over, whose future holds the result."""
    return torch._C._distributed_c10d._create_work_from_future(_completed(result))


class Transfer(dist.Work):  # type: ignore[misc]
    """The work of a message between two ranks.

    Args:
        message: is under way.
        elements: a flat tensor with the message's memory, which lives as long as the work.
        target: the tensor that gets the elements; None for what is sent.
    """

    def __init__(self, message: Message, elements: Any, target: Any = None) -> None:
        super().__init__()
        self._message, self._elements, self._target = message, elements, target

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the tensor may be used again, or has what was sent."""
        self._message.wait()
        if self._target is not None:
            t.copy_back(self._elements, self._target)
            self._target = None
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._message.test()

    def is_success(self) -> bool:
        """Return whether the message has arrived."""
        return self.is_completed()

    def _source_rank(self) -> int:
        assert self._message.source is not None
        return self._message.source

    source_rank = _source_rank

    def get_future(self) -> Any:
        """Return a future that is done; waits."""
        self.wait()
        return _completed([self._elements])


class Group:
    """The ranks of a process group of torch, and its collectives: one method each, with the arguments of c10d.

    Results are written into the tensors that are given.  Calls of several threads take turns.

    Args:
        communicator: of the group's ranks alone; it belongs to the group.
    """

    def __init__(self, communicator: MpiCommunicator) -> None:
        self.communicator: MpiCommunicator = communicator
        self._ranks = communicator.size
        self._turn = threading.RLock()

    @contextmanager
    def _call(self, name: str) -> Iterator[Call]:
        where = f"torch.distributed.{name}"
        with self._turn, Call(self.communicator.guard, where, anywhere=True) as call, torch.no_grad():
            yield call

    # ------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Replace each tensor by its reduction over the ranks."""
        with self._call("all_reduce") as call:
            op, factor = t.operation(opts, call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in tensors]
            if any(each.is_sparse for each in targets):
                self._all_reduce_rows(call, tensors, op)
            else:
                summands = [t.Summand(each, op, factor, call.where) for each in targets]
                call.agree("all_reduce", op=op, values=t.values_of(targets))
                for target, summand in zip(targets, summands, strict=True):
                    t.copy_back(self._reduced(summand), target)
        return done(list(tensors))

    allreduce_coalesced = allreduce

    def _reduced(self, summand: t.Summand) -> Any:
        """Reduce over the ranks, which have agreed."""
        if summand.elements.numel() and summand.is_bitwise:
            summand.combine(self._gathered(summand.elements).view(self._ranks, -1))
        elif summand.elements.numel():
            self.communicator.allreduce(summand.start(), summand.by)
        return summand.finish(self._ranks)

    def _all_reduce_rows(self, call: Call, targets: Sequence[Any], op: str) -> None:
        """Sum sparse COO tensors: the indices and values of all ranks together."""
        if op not in ("SUM", "AVG") or not all(each.is_sparse for each in targets):
            raise UnsupportedError.at(
                call.where,
                found=f"ReduceOp.{op} of sparse tensors, or of sparse and dense ones in one call",
                expected="SUM or AVG of sparse COO tensors",
            )
        given = [each.detach().coalesce() for each in targets]
        shapes = ", ".join(f"{each.dtype}{list(each.shape)} sparse in {each.sparse_dim()}" for each in given)
        call.agree("all_reduce", op=f"{op} of sparse tensors {shapes}")
        for target, mine in zip(targets, given, strict=True):
            depth, tail = mine.sparse_dim(), mine.values().shape[1:]
            counts = self._gathered(torch.tensor([mine._nnz()]))
            indices = self._gathered(t.flat(mine.indices().t()), (counts * depth).tolist()).view(-1, depth).t()
            values = self._gathered(t.flat(mine.values()), (counts * tail.numel()).tolist()).view(-1, *tail)
            total = torch.sparse_coo_tensor(indices, values, mine.shape, check_invariants=False).coalesce()
            target.copy_(total / self._ranks if op == "AVG" else total)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Replace the root's tensor by the reduction over the ranks; the others keep theirs."""
        with self._call("reduce") as call:
            op, factor = t.operation(opts, call.where)
            root, is_root = self._root(opts, call)
            targets = [t.checked(each, call.where, is_written=True) for each in tensors]
            summands = [t.Summand(each, op, factor, call.where, copied=not is_root) for each in targets]
            call.agree("reduce", op=op, values=t.values_of(targets), destination=f"rank {root}")
            for target, summand in zip(targets, summands, strict=True):
                result = self._reduced(summand)
                if is_root:
                    t.copy_back(result, target)
        return done(list(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce the r-th tensors of the ranks' lists into the output of rank r; their sizes may differ."""
        for output, parts in zip(outputs, inputs, strict=True):
            with self._call("reduce_scatter") as call:
                op, factor = t.operation(opts, call.where)
                target = t.checked(output, call.where, is_written=True)
                t.check_length(parts, self._ranks, "a list", call.where)
                t.check_elements(parts[self.communicator.rank], target.numel(), target.dtype, "an input", call.where)
                together = torch.cat([t.flat(each.detach()) for each in parts])
                summand = t.Summand(together, op, factor, call.where)
                call.agree("reduce_scatter", op=op, values=t.values_of(parts))
                mine = self._reduced(summand).split([each.numel() for each in parts])[self.communicator.rank]
                t.copy_back(mine, target)
        return done(list(outputs))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce a tensor, and write the r-th part of its elements into the output of rank r."""
        return self.reduce_scatter([output], [t.parts(input, self._ranks)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do so with several tensors."""
        return self.reduce_scatter(outputs, [t.parts(each, self._ranks) for each in inputs], opts)

    # -------------------------------------------------------------------------------------------------- gathers

    def _root(self, opts: Any, call: Call) -> tuple[int, bool]:
        root = t.checked_rank(opts.rootRank, self._ranks, "root", call.where)
        return root, self.communicator.rank == root

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Replace each tensor by the root's."""
        with self._call("broadcast") as call:
            root, _ = self._root(opts, call)
            targets = [t.checked(each, call.where, is_written=True) for each in tensors]
            elements = [t.flat(each) for each in targets]
            call.agree("broadcast", values=t.values_of(targets), destination=f"rank {root}")
            for target, each in zip(targets, elements, strict=True):
                if each.numel():
                    self.communicator.bcast(t.in_bytes(each), root)
                t.copy_back(each, target)
        return done(list(tensors))

    def _gathered(self, elements: Any, counts: Sequence[int] | None = None, into: Any = None) -> Any:
        """Return the ranks' elements one after the other; `counts` says how many there are, None: equally many."""
        sizes = [elements.numel()] * self._ranks if counts is None else counts
        together = torch.empty(sum(sizes), dtype=elements.dtype) if into is None else into
        if together.numel():
            sizes = [size * elements.element_size() for size in sizes]
            self.communicator.allgatherv(t.in_bytes(elements), sizes, t.in_bytes(together))
        return together

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the tensor of rank r into the r-th tensor of a list; the tensors' sizes may differ."""
        for targets, given in zip(outputs, inputs, strict=True):
            with self._call("all_gather") as call:
                t.check_length(targets, self._ranks, "a list of outputs", call.where)
                mine, into = t.checked(given, call.where), t.joined(targets)
                t.check_elements(targets[self.communicator.rank], mine.numel(), mine.dtype, "an output", call.where)
                written = [t.checked(each, call.where, is_written=True) for each in targets]
                for each in written:
                    t.check_elements(each, each.numel(), mine.dtype, "an output", call.where)
                elements, counts = t.flat(mine), [each.numel() for each in written]
                if into is not None and mine.untyped_storage().data_ptr() == into.untyped_storage().data_ptr():
                    elements = elements.clone()
                call.agree("all_gather", values=t.values_of(written))
                together = self._gathered(elements, counts, into)
                for target, part in zip(written, together.split(counts) if into is None else written, strict=True):
                    t.copy_back(part, target)
        return done(list(outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the k-th tensor of rank r into ``outputs[r][k]``."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Write the ranks' tensors, all of one size, one after the other into a tensor."""
        return self.allgather([t.parts(output, self._ranks)], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do so with several tensors."""
        return self.allgather([t.parts(each, self._ranks) for each in outputs], inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the tensor of rank r into the root's r-th output; all have one size."""
        with self._call("gather") as call:
            root, is_root = self._root(opts, call)
            targets = [t.checked(each, call.where, is_written=True) for each in outputs[0]] if is_root else []
            t.check_length(targets, self._ranks if is_root else 0, "a list of outputs", call.where)
            elements = t.flat(t.checked(inputs[0], call.where))
            for each in targets:
                t.check_elements(each, elements.numel(), elements.dtype, "an output", call.where)
            together = torch.empty(elements.numel() * len(targets), dtype=elements.dtype)
            call.agree("gather", values=t.values_of(inputs), destination=f"rank {root}")
            if elements.numel():
                sizes = [elements.numel() * elements.element_size()] * self._ranks
                into = t.in_bytes(together) if is_root else None
                self.communicator.gatherv(t.in_bytes(elements), sizes, into, root)
            for target, row in zip(targets, t.parts(together, self._ranks) if is_root else (), strict=True):
                t.copy_back(row, target)
        return done(targets)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the root's r-th input into the output of rank r; all have one size."""
        with self._call("scatter") as call:
            root, is_root = self._root(opts, call)
            target = t.checked(outputs[0], call.where, is_written=True)
            given = [t.checked(each, call.where) for each in inputs[0]] if is_root else []
            t.check_length(given, self._ranks if is_root else 0, "a list of inputs", call.where)
            for each in given:
                t.check_elements(each, target.numel(), target.dtype, "an input", call.where)
            blocks = [t.in_bytes(t.flat(each)) for each in given] if is_root else None
            mine = torch.empty(target.numel(), dtype=target.dtype)
            call.agree("scatter", values=t.values_of(outputs), destination=f"rank {root}")
            if mine.numel():
                self.communicator.scatter_blocks(blocks, t.in_bytes(mine), root)
            t.copy_back(mine, target)
        return done(list(outputs))

    # ----------------------------------------------------------------------------------------------- all to all

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send the r-th input to rank r, and write what rank r sends into the r-th output; sizes may differ."""
        with self._call("all_to_all") as call:
            for each, what in ((outputs, "a list of outputs"), (inputs, "a list of inputs")):
                t.check_length(each, self._ranks, what, call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in outputs]
            for each in (*targets, *inputs):
                t.check_elements(each, each.numel(), inputs[0].dtype, "a tensor", call.where)
            sent, counts = torch.cat([t.flat(each.detach()) for each in inputs]), [each.numel() for each in inputs]
            taken = [each.numel() for each in targets]
            received, _ = exchange(self.communicator, call, sent, counts, sent.element_size(), taken)
            for target, part in zip(targets, received.split(taken), strict=True):
                t.copy_back(part, target)
        return done(list(outputs))

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> Any:
        """Send the r-th part of a tensor's first axis to rank r; without splits the parts are equal."""
        with self._call("all_to_all_single") as call:
            target, given = t.checked(output, call.where, is_written=True), t.checked(input, call.where)
            t.check_elements(target, target.numel(), given.dtype, "an output", call.where)
            counts = t.lengths(given, input_splits, self._ranks, call.where)
            taken = t.lengths(target, output_splits, self._ranks, call.where)
            width = (given if given.numel() else target)[:1].numel() * given.element_size()
            received, _ = exchange(self.communicator, call, t.flat(given), counts, width, taken)
            t.copy_back(received, target)
        return done([output])

    # -------------------------------------------------------------------------------------- messages, barriers

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Begin to send a tensor to a rank of the group; it must not change until the work is done."""
        return self._transfer("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Begin to receive a tensor from a rank of the group."""
        return self._transfer("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Begin to receive a tensor from any rank of the group."""
        return self._transfer("recv", tensors, None, tag)

    def _transfer(self, name: str, tensors: Any, peer: int | None, tag: int) -> Any:
        where = f"torch.distributed.{name}"
        receives = name == "recv"
        tensor = t.checked(tensors[0], where, is_written=receives)
        if peer is not None:
            t.checked_rank(peer, self._ranks, "peer", where)
        if not 0 <= tag <= GREATEST_TAG:
            raise OptionError.at(where, found=f"tag {tag}", expected=f"an int from 0 to {GREATEST_TAG}")
        elements = t.flat(tensor)
        block = t.in_bytes(elements)
        with self._turn:
            if receives:
                message = self.communicator.begin_to_receive(block, peer, tag)
            else:
                assert peer is not None
                message = self.communicator.begin_to_send(block, peer, tag)
        return Transfer(message, elements, tensor if receives else None)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group."""
        with self._call("barrier") as call:
            call.agree("barrier")
        return done([])


def exchange(
    communicator: Communicator,
    call: Call,
    sent: Any,
    counts: Sequence[int],
    width: int,
    taken: Sequence[int] | None = None,
) -> tuple[Any, list[int]]:
    """Send parts of a tensor to all ranks.  Collective.

    Args:
        communicator: the ranks.
        call: the call that this is a part of; the ranks agree in it.
        sent: a flat tensor.
        counts: how many units go to each rank.
        width: of a unit, in bytes.
        taken: how many units come from each rank; None if this is to be found out.

    Returns:
        What all ranks have sent to this one, in rank order, as a flat tensor, and how many units of each.

    Raises:
        OptionError: on every rank, where `taken` is wrong.
    """
    call.agree(call.where, values=((str(sent.dtype), ()),))
    call.expect_more()
    found = np.empty(communicator.size, np.int64)
    communicator.alltoall(np.array(counts, np.int64), found)
    if taken is not None and found.tolist() != list(taken):
        raise OptionError.at(
            call.where,
            found=f"parts of {found.tolist()} elements for rank {communicator.rank}, from rank 0 on",
            expected=f"{list(taken)}, as its outputs are",
        )
    received = torch.empty(int(found.sum()) * width // sent.element_size(), dtype=sent.dtype)
    call.agree(call.where)
    sizes, lengths = np.multiply(counts, width).tolist(), (found * width).tolist()
    communicator.alltoallv(t.in_bytes(sent), sizes, t.in_bytes(received), lengths)
    return received, found.tolist()
