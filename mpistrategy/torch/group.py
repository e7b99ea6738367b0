"""The collectives of torch.distributed over the ranks of a communicator.

Each call is compared between the ranks before data move: its kind, operation, dtype, numbers of elements and root.  The
line of the program is reported and not compared, since ranks of torch programs make one call at several lines.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpistrategy.arrays.convert import as_device_array, like_given
from mpistrategy.arrays.values import event_of_reads
from mpistrategy.cross_device_ops.algorithms import MpiAllReduce
from mpistrategy.errors import OptionError, UnsupportedError
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.call_sites import Site, call_site, program_site
from mpistrategy.mpi.over_mpi.background import Background
from mpistrategy.mpi.over_mpi.messages import GREATEST_TAG, Message, exchange
from mpistrategy.mpi.over_mpi.ranks import MpiRanks
from mpistrategy.options import CommunicationOptions
from mpistrategy.reduction.collectives import broadcast as broadcast_arrays
from mpistrategy.reduction.collectives import gather as gather_arrays
from mpistrategy.reduction.plan import run_plan, usual_plan
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.reduction.transfer import layouts_of
from mpistrategy.torch import tensors as t

#: Whether torch takes a Work that is written in Python: not before 2.7.
_TAKES_WORKS = hasattr(dist.AllreduceOptions(), "asyncOp")


def completed_work(result: Any) -> Any:
    """Return the work of a finished call, or of a call on the current streams; its future holds the result."""
    tensors = [tensor for item in result for tensor in ([item] if isinstance(item, torch.Tensor) else item)]
    future: Any = torch.futures.Future(devices=list({tensor.device for tensor in tensors if tensor.is_cuda}))
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def chosen_seconds(timeout: timedelta) -> float | None:
    """Return the seconds of a timeout that the program has chosen; None for torch's own, and for none."""
    return timeout.total_seconds() if dist.constants.default_pg_timeout != timeout > timedelta() else None


class Transfer(dist.Work):  # type: ignore[misc]
    """The work of a message between two ranks.

    Args:
        group: whose timeout holds.
        message: is under way.
        results: a flat tensor with the message's memory, for a message that is received; else empty.
        targets: the tensor that gets the received elements.
    """

    def __init__(
        self, group: Group, message: Message, results: Sequence[Any] = (), targets: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self._group, self._message, self._results, self._targets = group, message, results, targets

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until the tensor may be used again, or has the data; a timeout of 0 stands for the group's timeout."""
        own = self._group.communicator.guard.timeout
        self._message.wait("torch.distributed.Work.wait", chosen_seconds(timeout) or own)
        t.write(self._results, self._targets)
        self._results = self._targets = ()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._message.test()

    def _source_rank(self) -> int | None:
        return self._message.source


class Reduction(dist.Work):  # type: ignore[misc]
    """The work of a reduction in the background.

    Args:
        background: where it is a job.
        job: its result to be.
        tensors: the results.
    """

    def __init__(self, background: Background, job: Future[Any], tensors: Sequence[Any]) -> None:
        super().__init__()
        self._background, self._job = background, job
        #: It holds the tensors after an error, too: torch ends the process over an exception in a future.
        self._future: Any = torch.futures.Future()
        future = self._future  # the job does not keep this object, which keeps the job
        job.add_done_callback(lambda _: future.set_result(tensors))

    def get_future(self) -> Any:
        """Return the future of the results."""
        return self._future

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until all that was submitted is done; raise its first error.  The calls have their own timeouts."""
        self._background.wait()
        self._background.result(self._job)
        return True

    def is_completed(self) -> bool:
        """Return whether this reduction is done."""
        return self._job.done()

    def _source_rank(self) -> int | None:
        return None


class Group:
    """The ranks of a process group of torch, and its collectives: one method each, with the arguments of c10d.

    Results are written into the tensors that are given.  Collectives of several threads take turns.

    Args:
        communicator: of the group's ranks alone; it belongs to the group.
    """

    def __init__(self, communicator: MpiRanks) -> None:
        self.communicator: MpiRanks = communicator
        self._ranks, self._rank = communicator.size, communicator.rank
        self._turn = threading.RLock()
        self._background = Background(communicator)
        atexit.register(self._background.end)  # the program may end without a wait, before the ranks say goodbye
        #: The backward pass that has reduced last, and how often.
        self._backward, self._reductions = -1, 0

    @contextmanager
    def _call(self, name: str, site: Site | None = None) -> Iterator[Call]:
        self._background.wait()
        with self._turn, Call(self.communicator.guard, f"torch.distributed.{name}", anywhere=True) as call:
            self.communicator.guard.site = site
            yield call

    # ------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Replace each tensor by its reduction over the ranks; large tensors go on in the background between nodes."""
        dense = [tensor.nbytes for tensor in tensors if tensor.is_cpu and not tensor.is_sparse]
        is_large = _TAKES_WORKS and len(dense) == len(tensors) and self._background.takes(sum(dense))
        goes_on = is_large and (opts is None or opts.asyncOp) and not self._background.is_here
        # another thread has other lines
        site = self._site() or (call_site() if goes_on else None)
        all_reduce = functools.partial(self._all_reduce, list(tensors), opts, site, is_large=is_large)
        if not goes_on:
            all_reduce()
            return completed_work(list(tensors))
        work = functools.partial(self._background.unless_failed, all_reduce)
        job = self._background.submit(work, "torch.distributed.all_reduce")
        if torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._background.wait)
        return Reduction(self._background, job, list(tensors))

    def _all_reduce(self, tensors: list[Any], opts: Any, site: Site | None, *, is_large: bool) -> None:
        with self._call("all_reduce", site) as call:
            targets = t.checked(tensors, call.where, dtype=tensors[0].dtype, is_written=True)
            if any(target.is_sparse for target in targets):
                self._all_reduce_rows(call, tensors, t.operation(opts, call.where)[0])
            else:
                t.write(self._reduced(call, targets, opts, in_place=True, is_large=is_large), targets)

    allreduce_coalesced = allreduce

    def _reduced(
        self,
        call: Call,
        tensors: Sequence[Any],
        opts: Any,
        *,
        in_place: bool = False,
        is_large: bool = False,
        **words: Any,
    ) -> list[Any]:
        """Return the reductions of tensors of one dtype, in the dtype of the sums.

        Args:
            call: the public call.
            tensors: this rank's, checked.
            opts: of c10d.
            in_place: whether results may be written into the tensors' own memory; else they are flat.
            is_large: whether the data travel as in the background, where other ranks may make this call.
            words: what else the ranks compare.
        """
        op, factor = t.operation(opts, call.where)
        dtype, by, bits, truncates = t.reduction(op, tensors[0].dtype, call.where)
        travels = "among those in the background" if is_large else ""
        alike = {"op": op, "values": t.values_of(tensors), "options": travels, **words}
        device = t.gpu_of(tensors)
        elements = [t.scaled(tensor, dtype, factor, device) for tensor in tensors]
        if bits is not None:
            wholes = self._moved(call, gather_arrays, 0, elements, (op, t.values_of(tensors)))
            return [functools.reduce(bits, whole.chunk(self._ranks)) for whole in wholes]
        if device is not None:
            call.structure = " ".join(map(str, alike.values()))
            reducer = Reducer(self.communicator, MpiAllReduce(), CommunicationOptions())
            with t.on_stream(device):
                results = reducer.all_reduce_leaves(call, by, elements, lambda: [""] * len(elements))
        else:
            arrays = [t.in_numpy(tensor) for tensor in elements]
            ranks = self._background.connected(call) if is_large else self.communicator
            plan = usual_plan(ranks, layouts_of(arrays), by)
            agree = functools.partial(call.agree, call.where, patiently=self._background.is_here, **alike)
            totals = run_plan(plan, arrays, agree, in_place=in_place)
            results = elements if in_place else [torch.from_numpy(total) for total in totals]
        if truncates:
            for result in results:
                result.div_(self._ranks, rounding_mode="trunc")
        return results

    def _site(self) -> Site | None:
        """Return the number of this reduction in its backward pass, as a call site; None outside of a backward pass."""
        backward = torch._C._current_graph_task_id()
        self._reductions, self._backward = self._reductions + 1 if backward == self._backward else 1, backward
        if backward < 0:
            return None
        site = program_site()  # backward of CUDA tensors runs in a thread of torch's
        return Site(f"{site.text}, reduction {self._reductions} of this backward", site.place)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _all_reduce_rows(self, call: Call, targets: Sequence[Any], op: str) -> None:
        """Sum sparse COO tensors: the indices and values of all ranks together."""
        if op not in ("SUM", "AVG") or not all(target.is_sparse for target in targets):
            raise UnsupportedError.at(
                call.where,
                found=f"ReduceOp.{op} of sparse tensors, or of sparse and dense ones in one call",
                expected="SUM or AVG of sparse COO tensors",
            )
        own_tensors = [target.coalesce() for target in targets]
        shapes = ", ".join(f"{own.dtype}{list(own.shape)} sparse in {own.sparse_dim()}" for own in own_tensors)
        parts = [part for own in own_tensors for part in (own.indices().t(), own.values())]
        gathered = iter(self._moved(call, gather_arrays, 0, parts, f"{op} of sparse tensors {shapes}"))
        for target, own in zip(targets, own_tensors, strict=True):
            indices = next(gathered).view(-1, own.sparse_dim()).t()
            values = next(gathered).view(-1, *own.values().shape[1:])
            total = torch.sparse_coo_tensor(indices, values, own.shape, device=values.device, check_invariants=False)
            if op == "AVG":
                total = total / self._ranks
            target.copy_(total.coalesce())

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Replace the root's tensor by the reduction over the ranks; the others keep theirs."""
        with self._call("reduce", self._site()) as call:
            root = self._member(opts.rootRank, "root", call.where)
            targets = t.checked(tensors, call.where, dtype=tensors[0].dtype, is_written=True)
            totals = self._reduced(call, targets, opts, in_place=self._rank == root, destination=f"rank {root}")
            t.write(totals, targets if self._rank == root else totals)
        return completed_work(list(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, wholes: Sequence[Any] = ()) -> Any:
        """Reduce the r-th tensors of the ranks' lists into the output of rank r; their sizes may differ.

        The tensors of a list may be the parts of an entry of `wholes`.
        """
        triples = list(zip(outputs, inputs, wholes or [None] * len(outputs), strict=True))
        for output, parts, whole in triples:
            with self._call("reduce_scatter", self._site()) as call:
                targets = t.checked([output], call.where, is_written=True)
                sources = t.checked(parts, call.where, count=self._ranks, dtype=output.dtype)
                t.checked([sources[self._rank]], call.where, numel=output.numel())
                elements = t.together(sources) if whole is None else whole.detach().reshape(-1)
                [total] = self._reduced(call, [elements], opts, values=t.values_of(sources))
                totals = total.split([source.numel() for source in sources])
                t.write([totals[self._rank]], targets)
        return completed_work(list(outputs))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Reduce a tensor, and write the r-th part of its elements into the output of rank r."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do so with several tensors."""
        return self.reduce_scatter(outputs, [t.parts(tensor, self._ranks) for tensor in inputs], opts, inputs)

    # -------------------------------------------------------------------------------------------------- gathers

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Replace each tensor by the root's."""
        with self._call("broadcast") as call:
            root = self._member(opts.rootRank, "root", call.where)
            targets = t.checked(tensors, call.where, is_written=True)
            t.write(self._moved(call, broadcast_arrays, root, targets, t.values_of(targets), in_place=True), targets)
        return completed_work(list(tensors))

    def _moved(
        self, call: Call, move: Callable[..., Any], to: int, tensors: Sequence[Any], alike: Any, **options: Any
    ) -> list[Any]:
        """Return the flat results of the library's broadcast from a rank, or of its gather along the first axis.

        Before data move the ranks compare `alike`.
        """
        device, call.structure = t.gpu_of(tensors), str(alike)
        with t.on_stream(device):
            buffers = [t.in_bytes(tensor, device) for tensor in tensors]
            arrays = buffers if device is None else [as_device_array(buffer, call.where) for buffer in buffers]
            results = move(self.communicator, arrays, to, call, **options)
            if device is not None:
                self.communicator.guard.wait_for_gpu(event_of_reads(buffers))
                results = [*map(like_given, results, buffers)]
            return [t.from_bytes(*pair) for pair in zip(results, tensors, strict=True)]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, wholes: Sequence[Any] = ()) -> Any:
        """Write the tensor of rank r into the r-th tensor of a list; the tensors' sizes may differ.

        The tensors of a list may be the parts of an entry of `wholes`, a tensor.
        """
        triples = list(zip(inputs, outputs, wholes or [None] * len(outputs), strict=True))
        for tensor, parts, whole in triples:
            with self._call("all_gather") as call:
                [own] = t.checked([tensor], call.where)
                targets = t.checked(parts, call.where, count=self._ranks, dtype=own.dtype, is_written=True)
                t.checked([targets[self._rank]], call.where, numel=own.numel())
                into = [t.in_bytes(whole.detach())] if whole is not None and whole.is_cpu else None
                [gathered] = self._moved(call, gather_arrays, 0, [own], t.values_of(targets), into=into)
                counts = [target.numel() for target in targets]
                t.write(gathered.split(counts), targets)
        return completed_work(list(outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the k-th tensor of rank r into ``outputs[r][k]``."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Write the ranks' tensors, all of one size, one after the other into a tensor."""
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Do so with several tensors."""
        return self.allgather([t.parts(output, self._ranks) for output in outputs], inputs, wholes=outputs)

    # ------------------------------------------------------------------------------------ parts for single ranks

    def _exchange(
        self,
        call: Call,
        targets: Sequence[Any],
        sources: Sequence[Any],
        alike: Sequence[Any] = (),
        destination: str = "",
        whole: Any = None,
    ) -> None:
        """Send the r-th tensor to rank r, and write the tensor of rank r into the r-th target.

        The ranks compare the numbers of elements of the tensors that are `alike` on all of them, and the destination.
        The tensors may be the parts of `whole`.
        """
        t.checked([*targets, *sources], call.where, dtype=sources[0].dtype)
        elements = t.flat(t.together(sources) if whole is None else whole)
        source_counts = [source.numel() for source in sources]
        target_counts = [target.numel() for target in targets]
        received, _ = exchange(
            self.communicator,
            call,
            t.in_bytes(elements),
            source_counts,
            elements.element_size(),
            target_counts,
            values=t.values_of(alike or [elements[:0]]),
            destination=destination,
        )
        results = t.from_bytes(received, elements).split(target_counts)
        t.write(results, targets)

    def _only(self, rank: int, tensor: Any) -> list[Any]:
        """Return a list with a tensor for one rank (no rank for -1), and empty tensors for the other ranks."""
        return [tensor if other == rank else tensor.new_empty(0) for other in range(self._ranks)]

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the tensor of rank r into the root's r-th output; all have one size."""
        with self._call("gather") as call:
            root = self._member(opts.rootRank, "root", call.where)
            [own] = t.checked(inputs, call.where)
            if self._rank == root:
                parts, numel = outputs[0], own.numel()
            else:
                parts, numel = self._only(-1, own), 0
            targets = t.checked(parts, call.where, count=self._ranks, numel=numel, is_written=True)
            self._exchange(call, targets, self._only(root, own), [own], f"rank {root}")
        return completed_work(targets)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the root's r-th input into the output of rank r; all have one size."""
        with self._call("scatter") as call:
            root = self._member(opts.rootRank, "root", call.where)
            [own] = t.checked(outputs, call.where, is_written=True)
            if self._rank == root:
                parts, numel = inputs[0], own.numel()
            else:
                parts, numel = self._only(-1, own), 0
            sources = t.checked(parts, call.where, count=self._ranks, numel=numel)
            self._exchange(call, self._only(root, own), sources, [own], f"rank {root}")
        return completed_work(list(outputs))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send the r-th input to rank r, and write the input of rank r into the r-th output; sizes may differ."""
        with self._call("all_to_all") as call:
            targets = t.checked(outputs, call.where, count=self._ranks, is_written=True)
            sources = t.checked(inputs, call.where, count=self._ranks)
            self._exchange(call, targets, sources)
        return completed_work(list(outputs))

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> Any:
        """Send the r-th part of a tensor's first axis to rank r; without splits the parts are equal."""
        with self._call("all_to_all_single") as call:
            [target] = t.checked([output], call.where, is_written=True)
            [source] = t.checked([input], call.where)
            targets = target.split(t.lengths(target, output_splits, self._ranks, call.where))
            sources = source.split(t.lengths(source, input_splits, self._ranks, call.where))
            self._exchange(call, targets, sources, whole=source)
        return completed_work([output])

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
        where, receives = f"torch.distributed.{name}", name == "recv"
        targets = t.checked(tensors, where, count=1, is_written=receives)
        self._member(peer or 0, "peer", where)
        if not 0 <= tag <= GREATEST_TAG:
            raise OptionError.at(where, found=f"tag {tag}", expected=f"an int from 0 to {GREATEST_TAG}")
        elements = t.flat(targets[0])
        # takes no turn: the reduction in the background, which has it, may wait for this message on another rank
        message = self.communicator.begin_message(t.in_bytes(elements), peer, tag, sends=not receives)
        if receives:
            return Transfer(self, message, [elements], targets)
        return Transfer(self, message)

    def _member(self, rank: int, role: str, where: str) -> int:
        """Return a rank of the group."""
        if not 0 <= rank < self._ranks:
            raise OptionError.at(
                where, found=f"{role} {rank}", expected=f"a rank of the group, from 0 to {self._ranks - 1}"
            )
        return rank

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the group."""
        with self._call("barrier") as call:
            call.wait_as(None if opts is None else chosen_seconds(opts.timeout))
            call.agree(call.where)
        return completed_work([])
