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
from torch.futures import Future

from mpistrategy.errors import OptionError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.over_mpi.collectives import GREATEST_TAG, Message
from mpistrategy.mpi.over_mpi.communicator import MpiCommunicator
from mpistrategy.torch import tensors as t

_Work: Any = torch._C._distributed_c10d.Work


def done(result: Any) -> Any:
    """Return the work of a call that is over, whose future holds the result."""
    future: Any = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Transfer(_Work):  # type: ignore[misc]
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
        future: Any = Future()
        future.set_result([self._elements])
        return future


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
        self._collected: list[Any] | None = None

    @contextmanager
    def _call(self, name: str) -> Iterator[Call]:
        where = f"torch.distributed.{name}"
        with self._turn, Call(self.communicator.guard, where, anywhere=True) as call, torch.no_grad():
            yield call

    # ------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Replace each tensor by its reduction over the ranks."""
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Do `allreduce` with several tensors in one call."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Sequence[Any], opts: Any) -> Any:
        with self._call(name) as call:
            op, factor = t.operation(_op_of(opts), call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in tensors]
            if any(each.is_sparse for each in targets):
                self._all_reduce_rows(call, tensors, op)
            else:
                summands = [t.Summand(each, op, factor, call.where) for each in targets]
                call.agree(name, op=op, values=t.values_of(targets))
                for target, summand in zip(targets, summands, strict=True):
                    t.copy_back(self._reduced(summand), target)
        return done(list(tensors))

    def _reduced(self, summand: t.Summand) -> Any:
        """Reduce over the ranks, which have agreed."""
        if summand.elements.numel():
            if summand.is_bitwise:
                summand.combine(self._gathered(summand.elements).view(self._ranks, -1))
            else:
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
        given = [each.coalesce() for each in targets]
        shapes = ", ".join(f"{list(each.shape)} sparse in {each.sparse_dim()}" for each in given)
        call.agree(
            "all_reduce", op=f"{op} of sparse tensors {shapes}", values=tuple((str(each.dtype), ()) for each in given)
        )
        for target, mine in zip(targets, given, strict=True):
            counts = self._gathered(torch.tensor([mine._nnz()])).tolist()
            parts = self._gathered_uneven(t.flat(mine.indices().t()), [n * mine.sparse_dim() for n in counts])
            indices = parts.view(-1, mine.sparse_dim()).t()
            tail = mine.values().shape[1:]
            values = self._gathered_uneven(t.flat(mine.values()), [n * tail.numel() for n in counts]).view(-1, *tail)
            total = torch.sparse_coo_tensor(indices, values, mine.shape, check_invariants=False).coalesce()
            target.copy_(total / self._ranks if op == "AVG" else total)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Replace the root's tensor by the reduction over the ranks; the others keep theirs."""
        with self._call("reduce") as call:
            op, factor = t.operation(opts.reduceOp, call.where)
            root = t.checked_rank(opts.rootRank, self._ranks, "root", call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in tensors]
            is_root = self.communicator.rank == root
            summands = [t.Summand(each, op, factor, call.where, copied=not is_root) for each in targets]
            call.agree("reduce", op=op, values=t.values_of(targets), destination=f"rank {root}")
            for target, summand in zip(targets, summands, strict=True):
                result = self._reduced(summand)
                if is_root:
                    t.copy_back(result, target)
        return done(list(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce the r-th tensors of the ranks' lists into the output of rank r."""
        with self._call("reduce_scatter") as call:
            op, factor = t.operation(opts.reduceOp, call.where)
            together = []
            for output, parts in zip(outputs, inputs, strict=True):
                t.check_length(parts, self._ranks, "a list", call.where)
                t.check_elements(output, parts[self.communicator.rank].numel(), parts[0].dtype, "an output", call.where)
                together.append(torch.cat([t.flat(each.detach()) for each in parts]))
            targets = [t.checked(each, call.where, is_written=True) for each in outputs]
            summands = [t.Summand(each, op, factor, call.where, copied=False) for each in together]
            values = tuple(value for parts in inputs for value in t.values_of(parts))
            call.agree("reduce_scatter", op=op, values=values)
            for target, summand, parts in zip(targets, summands, inputs, strict=True):
                start = sum(each.numel() for each in parts[: self.communicator.rank])
                t.copy_back(self._reduced(summand)[start : start + target.numel()], target)
        return done(list(outputs))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce a tensor, and write the r-th part of its first axis into the output of rank r."""
        return self._reduce_scatter_parts("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do so with several tensors in one call."""
        return self._reduce_scatter_parts("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_parts(self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any) -> Any:
        with self._call(name) as call:
            op, factor = t.operation(_op_of(opts), call.where)
            for output, whole in zip(outputs, inputs, strict=True):
                t.check_elements(whole, output.numel() * self._ranks, output.dtype, "an input", call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in outputs]
            given = [t.checked(each, call.where) for each in inputs]
            summands = [t.Summand(each, op, factor, call.where, copied=True) for each in given]
            call.agree(name, op=op, values=t.values_of(given))
            for target, summand in zip(targets, summands, strict=True):
                start = self.communicator.rank * target.numel()
                t.copy_back(self._reduced(summand)[start : start + target.numel()], target)
        return done(list(outputs))

    # -------------------------------------------------------------------------------------------------- gathers

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Replace each tensor by the root's."""
        with self._call("broadcast") as call:
            root = t.checked_rank(opts.rootRank, self._ranks, "root", call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in tensors]
            elements = [t.flat(each) for each in targets]
            call.agree("broadcast", values=t.values_of(targets), destination=f"rank {root}")
            for target, each in zip(targets, elements, strict=True):
                if each.numel():
                    self.communicator.bcast(t.in_bytes(each), root)
                t.copy_back(each, target)
        return done(list(tensors))

    def _gathered(self, elements: Any) -> Any:
        """Return the ranks' elements, as many on each, one after the other."""
        return self._gathered_uneven(elements, [elements.numel()] * self._ranks)

    def _gathered_uneven(self, elements: Any, counts: Sequence[int]) -> Any:
        together = torch.empty(sum(counts), dtype=elements.dtype)
        if together.numel():
            sizes = [count * elements.element_size() for count in counts]
            self.communicator.allgatherv(t.in_bytes(elements), sizes, t.in_bytes(together))
        return together

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the tensor of rank r into the r-th tensor of a list; the tensors' sizes may differ."""
        with self._call("all_gather") as call:
            mine, counts = [], []
            for targets, given in zip(outputs, inputs, strict=True):
                t.check_length(targets, self._ranks, "a list of outputs", call.where)
                own = targets[self.communicator.rank]
                t.check_elements(given, own.numel(), own.dtype, "an input", call.where)
                for each in targets:
                    t.checked(each, call.where, is_written=True)
                    t.check_elements(each, each.numel(), given.dtype, "an output", call.where)
                mine.append(t.flat(t.checked(given, call.where)))
                counts.append([each.numel() for each in targets])
            call.agree("all_gather", values=tuple(value for targets in outputs for value in t.values_of(targets)))
            for targets, given, sizes in zip(outputs, mine, counts, strict=True):
                parts = self._gathered_uneven(given, sizes).split(sizes)
                for target, part in zip(targets, parts, strict=True):
                    t.copy_back(part, target.detach())
        return done(list(outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the k-th tensor of rank r into ``outputs[r][k]``."""
        with self._call("all_gather_coalesced") as call:
            t.check_length(outputs, self._ranks, "a list of outputs", call.where)
            given = [t.checked(each, call.where) for each in inputs]
            for targets in outputs:
                t.check_length(targets, len(given), "a list of outputs", call.where)
                for each, mine in zip(targets, given, strict=True):
                    t.checked(each, call.where, is_written=True)
                    t.check_elements(each, mine.numel(), mine.dtype, "an output", call.where)
            elements = [t.flat(each) for each in given]
            call.agree("all_gather_coalesced", values=t.values_of(given))
            for at, each in enumerate(elements):
                for targets, row in zip(outputs, self._gathered(each).view(self._ranks, -1), strict=True):
                    t.copy_back(row, targets[at].detach())
        return done(list(outputs))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Write the ranks' tensors, all of one size, one after the other into a tensor."""
        return self._all_gather_into("all_gather_into_tensor", [output], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do so with several tensors in one call."""
        return self._all_gather_into("all_gather_into_tensor_coalesced", outputs, inputs)

    def _all_gather_into(self, name: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
        with self._call(name) as call:
            for output, mine in zip(outputs, inputs, strict=True):
                t.check_elements(output, mine.numel() * self._ranks, mine.dtype, "an output", call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in outputs]
            given = [t.checked(each, call.where) for each in inputs]
            elements = [t.flat(each) for each in given]
            call.agree(name, values=t.values_of(given))
            for target, each in zip(targets, elements, strict=True):
                if not each.numel():
                    continue
                if target.is_contiguous() and target.device.type == "cpu" and not _meet(target, each):
                    sizes = [each.numel() * each.element_size()] * self._ranks
                    self.communicator.allgatherv(t.in_bytes(each), sizes, t.in_bytes(target.view(-1)))
                else:
                    t.copy_back(self._gathered(each), target)
        return done(list(outputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the tensor of rank r into the root's r-th output; all have one size."""
        with self._call("gather") as call:
            root = t.checked_rank(opts.rootRank, self._ranks, "root", call.where)
            (given,), is_root = inputs, self.communicator.rank == root
            targets = outputs[0] if is_root else []
            t.check_length(targets, self._ranks if is_root else 0, "a list of outputs", call.where)
            for each in targets:
                t.checked(each, call.where, is_written=True)
                t.check_elements(each, given.numel(), given.dtype, "an output", call.where)
            elements = t.flat(t.checked(given, call.where))
            together = torch.empty(elements.numel() * len(targets), dtype=elements.dtype)
            call.agree("gather", values=t.values_of(inputs), destination=f"rank {root}")
            if elements.numel():
                sizes = [elements.numel() * elements.element_size()] * self._ranks
                gathered = t.in_bytes(together) if is_root else None
                self.communicator.gatherv(t.in_bytes(elements), sizes, gathered, root)
            for target, row in zip(targets, together.view(len(targets), -1) if targets else (), strict=True):
                t.copy_back(row, target.detach())
        return done([each for targets in outputs for each in targets])

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the root's r-th input into the output of rank r; all have one size."""
        with self._call("scatter") as call:
            root = t.checked_rank(opts.rootRank, self._ranks, "root", call.where)
            (output,), is_root = outputs, self.communicator.rank == root
            given = inputs[0] if is_root else []
            t.check_length(given, self._ranks if is_root else 0, "a list of inputs", call.where)
            for each in given:
                t.check_elements(each, output.numel(), output.dtype, "an input", call.where)
            target = t.checked(output, call.where, is_written=True)
            blocks = [t.in_bytes(t.flat(t.checked(each, call.where))) for each in given] if is_root else None
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
            dtype = inputs[0].dtype
            for each in (*outputs, *inputs):
                t.check_elements(each, each.numel(), dtype, "a tensor", call.where)
            targets = [t.checked(each, call.where, is_written=True) for each in outputs]
            sent = torch.cat([t.flat(t.checked(each, call.where)) for each in inputs])
            counts, taken = [each.numel() for each in inputs], [each.numel() for each in outputs]
            received = torch.empty(sum(taken), dtype=dtype)
            self._exchange(call, "all_to_all", sent, counts, received, taken)
            for target, part in zip(targets, received.split(taken), strict=True):
                t.copy_back(part, target)
        return done(list(outputs))

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """Send the r-th part of a tensor's first axis to rank r; without splits the parts are equal."""
        with self._call("all_to_all_single") as call:
            target = t.checked(output, call.where, is_written=True)
            given = t.checked(input, call.where)
            t.check_elements(output, output.numel(), input.dtype, "an output", call.where)
            counts = self._parts(given, input_splits, "input", call.where)
            taken = self._parts(target, output_splits, "output", call.where)
            sent = t.flat(given)
            received = torch.empty(target.numel(), dtype=target.dtype)
            self._exchange(call, "all_to_all_single", sent, counts, received, taken)
            t.copy_back(received, target)
        return done([output])

    def _parts(self, tensor: Any, splits: Sequence[int], what: str, where: str) -> list[int]:
        """Return how many elements belong to each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        chosen = list(splits) or [rows // self._ranks] * self._ranks
        if len(chosen) != self._ranks or sum(chosen) != rows or min(chosen) < 0:
            raise OptionError.at(
                where,
                found=f"{what} splits {chosen} of a tensor of shape {list(tensor.shape)}",
                expected=f"{self._ranks} lengths along the first axis, whose sum is {rows}",
            )
        return [length * (tensor.numel() // rows if rows else 0) for length in chosen]

    def _exchange(
        self, call: Call, name: str, sent: Any, counts: Sequence[int], received: Any, taken: Sequence[int]
    ) -> None:
        """Exchange parts between all ranks; on all of them an error where a part does not fit."""
        call.agree(name, values=((str(sent.dtype), ()),))
        call.expect_more()
        offered, wanted = np.array(counts, np.int64), np.empty(self._ranks, np.int64)
        self.communicator.alltoall(offered, wanted)
        if wanted.tolist() != list(taken):
            raise OptionError.at(
                call.where,
                found=f"parts of {wanted.tolist()} elements for rank {self.communicator.rank}, from rank 0 on",
                expected=f"{list(taken)}, as its outputs are",
            )
        call.agree(name)
        width = sent.element_size()
        sizes, lengths = [count * width for count in counts], [count * width for count in taken]
        self.communicator.alltoallv(t.in_bytes(sent), sizes, t.in_bytes(received), lengths)

    # -------------------------------------------------------------------------------------- messages, barriers

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Begin to send a tensor to a rank of the group; it must not change until the work is done."""
        where = "torch.distributed.send"
        (tensor,) = tensors
        rank = t.checked_rank(dst, self._ranks, "destination", where)
        elements = t.flat(t.checked(tensor, where))
        with self._turn:
            message = self.communicator.begin_to_send(t.in_bytes(elements), rank, _checked_tag(tag, where))
        return Transfer(message, elements)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Begin to receive a tensor from a rank of the group."""
        rank = t.checked_rank(src, self._ranks, "source", "torch.distributed.recv")
        return self._receive(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Begin to receive a tensor from any rank of the group."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, rank: int | None, tag: int) -> Any:
        where = "torch.distributed.recv"
        (tensor,) = tensors
        target = t.checked(tensor, where, is_written=True)
        elements = t.flat(target)
        with self._turn:
            message = self.communicator.begin_to_receive(t.in_bytes(elements), rank, _checked_tag(tag, where))
        return Transfer(message, elements, target)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group."""
        with self._call("barrier") as call:
            call.agree("barrier")
        return done([])

    def close(self) -> None:
        """Free the communicator, where all ranks of the group do so."""
        self.communicator.free()


def _op_of(opts: Any) -> Any:
    return torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp


def _meet(some: Any, others: Any) -> bool:
    """Return whether two tensors may share memory."""
    return bool(some.untyped_storage().data_ptr() == others.untyped_storage().data_ptr())


def _checked_tag(tag: int, where: str) -> int:
    if not 0 <= tag <= GREATEST_TAG:
        raise OptionError.at(where, found=f"tag {tag}", expected=f"an int from 0 to {GREATEST_TAG}")
    return tag
