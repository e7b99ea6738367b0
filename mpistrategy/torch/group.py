"""The backend "mpistrategy" of torch.distributed: a process group whose ranks, store and messages are MPI's.

Each collective is compared between the ranks before data move: its kind, operation, dtype, numbers of elements and
root.  The line of the program is reported and not compared, since ranks of torch programs make one call at several
lines.

Up to torch 2.13 only a ProcessGroup can be written in Python, from 2.14 on a Backend, behind torch's own group.
"""

from __future__ import annotations

import atexit
import functools
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import typing_extensions

from mpistrategy.cross_device_ops.algorithms import MpiAllReduce
from mpistrategy.errors import ContextError, LaunchError, OptionError, UnsupportedError
from mpistrategy.mpi.contract import call_sites
from mpistrategy.mpi.contract.call import Call
from mpistrategy.mpi.contract.guard import time_limit
from mpistrategy.mpi.interface.ranks import GREATEST_TAG, Alone
from mpistrategy.mpi.job import exit_hooks
from mpistrategy.mpi.over_mpi.background import Background
from mpistrategy.options import CommunicationOptions, ReduceOp
from mpistrategy.reduction import collectives
from mpistrategy.reduction.reducer import Reducer
from mpistrategy.strategy.mirrored import MirroredStrategy
from mpistrategy.strategy.strategy import Strategy
from mpistrategy.torch import tensors as t

if TYPE_CHECKING:  # their import starts MPI, which the first strategy does: not in a process that loads data
    from mpistrategy.mpi.over_mpi.messages import Message
    from mpistrategy.mpi.over_mpi.ranks import MpiRanks

# What can be written in Python; torch compares its version as a version, not as a text.
_Base: type[dist.ProcessGroup] = dist.ProcessGroup if torch.__version__ < "2.14" else torch._C._distributed_c10d.Backend

NAME = "mpistrategy"
_WHERE = "mpistrategy.torch.init_process_group"
#: What to write, of errors.
_FORM = (
    f'For the backend "{NAME}" write init_process_group("{NAME}", init_method="{NAME}://"), '
    "or mpistrategy.torch.init_process_group()."
)
#: A sum; the options of calls without any.
_SUM: Any = dist.AllreduceOptions()
#: Whether torch takes a Work that is written in Python: not before 2.7.
_TAKES_WORKS = hasattr(_SUM, "asyncOp")

#: References to groups: C++ holds them, too, but falls back to its base class once their Python half is gone.
_references: list[Any] = []
#: The strategy whose ranks the next default group has, unless it is to have all.
_pending: list[Strategy] = []


def _completed_work(result: Any) -> Any:
    """Return the work of a finished call, or of a call on the current streams; its future holds the result."""
    lists = [[item] if isinstance(item, torch.Tensor) else item for item in result]
    devices = {tensor.device for tensors in lists for tensor in tensors if tensor.is_cuda}
    future: Any = torch.futures.Future(devices=list(devices))
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _chosen_seconds(timeout: timedelta) -> float | None:
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

    def __init__(self, group: ProcessGroupMPI, message: Message, results: Any, targets: Any) -> None:
        super().__init__()
        self._group, self._message, self._results, self._targets = group, message, results, targets

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until the tensor may be used again, or has the data; a timeout of 0 stands for the group's timeout."""
        own = self._group.communicator.guard.timeout
        self._message.wait("torch.distributed.Work.wait", _chosen_seconds(timeout) or own)
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
        # It holds the tensors after an error, too: torch ends the process over an exception in a future.
        future: Any = torch.futures.Future()
        job.add_done_callback(lambda _: future.set_result(tensors))  # the job keeps this, not the object that keeps it
        self._background, self._job, self._future = background, job, future

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


class ProcessGroupMPI(_Base):  # type: ignore[misc]
    """The ranks of a process group of torch, or of a backend of one, and its collectives with the arguments of c10d.

    Results are written into the tensors that are given.  Collectives of several threads take turns.

    Args:
        communicator: of the group's ranks alone; it belongs to the group.
        store: made by torch.
    """

    def __init__(self, communicator: MpiRanks, store: Any) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator: MpiRanks = communicator
        self._ranks, self._rank, self._store = communicator.size, communicator.rank, store
        self._reducer = Reducer(communicator, MpiAllReduce(), CommunicationOptions())
        self._turn = threading.RLock()
        self._background = Background(communicator)
        atexit.register(self._background.end)  # the program may end without a wait, before the ranks say goodbye
        #: The backward pass that has reduced last, and how often.
        self._backward, self._reductions = -1, 0

    def _in_turn(self) -> threading.RLock:
        """Wait for the background; return the lock of the calls."""
        self._background.wait()
        return self._turn

    def _call(self, name: str, site: call_sites.Site | None = None) -> Call:
        call = Call(self.communicator.guard, f"torch.distributed.{name}", anywhere=True)
        self.communicator.guard.site, call.is_patient = site, self._background.is_here
        return call

    # ------------------------------------------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = _SUM) -> Any:
        """Replace each tensor by its reduction over the ranks; large tensors go on in the background between nodes."""
        given = list(tensors)
        dense = [tensor.nbytes for tensor in given if tensor.is_cpu and not tensor.is_sparse]
        is_large = _TAKES_WORKS and len(dense) == len(given) and self._background.takes(sum(dense))
        goes_on = is_large and opts.asyncOp and not self._background.is_here
        # another thread has other lines
        site = self._site() or (call_sites.call_site() if goes_on else None)

        def all_reduce() -> None:
            with self._in_turn(), self._call("all_reduce", site) as call:
                targets = t.checked(given, call.where, is_written=True)
                if any(target.is_sparse for target in targets):
                    self._all_reduce_rows(call, given, t.operation(opts)[0])
                else:
                    t.write(self._reduced(call, targets, opts, in_place=True, is_large=is_large), targets)

        if not goes_on:
            all_reduce()
            return _completed_work(given)
        job = self._background.submit(all_reduce, "torch.distributed.all_reduce")
        if torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._background.wait)
        return Reduction(self._background, job, given)

    allreduce_coalesced = allreduce

    def _reduced(
        self,
        call: Call,
        tensors: Sequence[Any],
        opts: Any,
        *,
        in_place: bool = False,
        is_large: bool = False,
        words: str = "",
    ) -> list[Any]:
        """Return the reductions of tensors of one dtype, flat, in the dtype of the sums.

        Args:
            call: the public call.
            tensors: this rank's, checked.
            opts: of c10d.
            in_place: whether results may be written into the tensors' own memory.
            is_large: whether the data travel as in the background, where other ranks may make this call.
            words: what else the ranks compare.
        """
        op, factor = t.operation(opts)
        by, bits = t.reduction(op, tensors[0].dtype, call.where)
        device, count = t.gpu_of(tensors), self._ranks
        elements = [t.wide(tensor) for tensor in tensors]
        if op == "PREMUL_SUM":
            elements = [each * factor for each in elements]
        if bits is not None:
            wholes = self._moved(call, collectives.gather, 0, elements, (op, t.values_of(tensors)))
            return [functools.reduce(bits, whole.chunk(count)) for whole in wholes]
        call.structure = f"{op} of {tensors[0].dtype}{words}{' among those in the background' if is_large else ''}"
        reducer = self._reducer
        if is_large:
            ranks = self._background.connected(call)
            reducer = ranks.once(Reducer, functools.partial(Reducer, ranks, reducer.algorithm, reducer.options))
        with t.on_stream(device):
            own = [t.in_numpy(each.cpu().contiguous()) if device is None else t.flat(each, device) for each in elements]
            totals: list[Any] = reducer.all_reduce_arrays(call, by, own, in_place=in_place and device is None)
            results = [torch.from_numpy(total) if device is None else total for total in totals]
        if op == "AVG" and by is ReduceOp.SUM:  # of whole numbers
            for result in results:
                result.div_(count, rounding_mode="trunc")
        return results

    def _site(self) -> call_sites.Site | None:
        """Return the number of this reduction in its backward pass, as a call site; None outside of a backward pass."""
        backward = torch._C._current_graph_task_id()
        self._reductions, self._backward = self._reductions + 1 if backward == self._backward else 1, backward
        if backward < 0:
            return None
        site = call_sites.program_site()  # backward of CUDA tensors runs in a thread of torch's
        return call_sites.Site(f"{site.text}, reduction {self._reductions} of this backward", site.place)

    def _all_reduce_rows(self, call: Call, targets: Sequence[Any], op: str) -> None:
        """Sum sparse COO tensors: the indices and values of all ranks together."""
        if op not in ("SUM", "AVG") or not all(target.is_sparse for target in targets):
            raise UnsupportedError.at(
                call.where,
                found=f"ReduceOp.{op} of sparse tensors, or of sparse and dense ones in one call",
                expected="SUM or AVG of sparse COO tensors",
            )
        call.name = ", ".join(f"{op} of {target.dtype}{list(target.shape)}" for target in targets)
        with t.on_stream(t.gpu_of(targets)), torch.no_grad():
            for target in targets:
                target.copy_(t.sum_of_rows(call, self._reducer, target, target.shape, divides=op == "AVG"))

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Replace the root's tensor by the reduction over the ranks; the others keep theirs."""
        with self._in_turn(), self._call("reduce", self._site()) as call:
            root = collectives.checked_root(opts.rootRank, self._ranks, call.where)
            targets = t.checked(tensors, call.where, is_written=True)
            totals = self._reduced(call, targets, opts, words=f", to rank {root}")
            if self._rank == root:
                t.write(totals, targets)
        return _completed_work(list(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = _SUM) -> Any:
        """Reduce the r-th tensors of the ranks' lists into the output of rank r; their sizes may differ.

        The lists may be tensors, too, of which each rank gets an equal part of the elements.
        """
        for output, given in zip(outputs, inputs, strict=True):
            with self._in_turn(), self._call("reduce_scatter", self._site()) as call:
                sources = t.parts(given, self._ranks)
                t.checked(sources, call.where, count=self._ranks, dtype=output.dtype)
                targets = t.checked([output], call.where, numel=sources[self._rank].numel(), is_written=True)
                sizes = [source.numel() for source in sources]
                [total] = self._reduced(call, [t.together(given)], opts, words=f", in parts of {sizes}")
                t.write([total.split(sizes)[self._rank]], targets)
        return _completed_work(list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = _SUM) -> Any:
        """Reduce a tensor, and write the r-th part of its elements into the output of rank r."""
        return self.reduce_scatter([output], [input], opts)

    # -------------------------------------------------------------------------------------------------- gathers

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Replace each tensor by the root's."""
        with self._in_turn(), self._call("broadcast") as call:
            root = collectives.checked_root(opts.rootRank, self._ranks, call.where)
            targets = t.checked(tensors, call.where, is_written=True)
            alike = t.values_of(targets)
            t.write(self._moved(call, collectives.broadcast, root, targets, alike, in_place=True), targets)
        return _completed_work(list(tensors))

    def _moved(
        self, call: Call, move: Callable[..., Any], to: int, tensors: Sequence[Any], alike: Any, **options: Any
    ) -> list[Any]:
        """Return the flat results of the library's broadcast from a rank, or of its gather along the first axis.

        Before data move the ranks compare `alike`.
        """
        device, call.structure = t.gpu_of(tensors), str(alike)
        with t.on_stream(device):
            buffers = [t.in_bytes(tensor, device) for tensor in tensors]
            results = move(self.communicator, buffers, to, call, **options)
            return [t.from_bytes(*pair) for pair in zip(results, tensors, strict=True)]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the tensor of rank r into the r-th tensor of a list; the tensors' sizes may differ.

        The lists may be tensors, too, of which each rank's tensor is an equal part.
        """
        for tensor, given in zip(inputs, outputs, strict=True):
            with self._in_turn(), self._call("all_gather") as call:
                parts = t.parts(given, self._ranks)
                targets = t.checked(parts, call.where, count=self._ranks, dtype=tensor.dtype, is_written=True)
                [own] = t.checked([tensor], call.where, numel=targets[self._rank].numel())
                whole = [given] if isinstance(given, torch.Tensor) and given.is_cpu else []
                into = [*map(t.in_bytes, t.checked(whole, call.where))] or None
                [gathered] = self._moved(call, collectives.gather, 0, [own], t.values_of(targets), into=into)
                t.write(gathered.split([target.numel() for target in targets]), targets)
        return _completed_work(list(outputs))

    all_gather_single_coalesced = allgather

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Write the k-th tensor of rank r into ``outputs[r][k]``."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Write the ranks' tensors, all of one size, one after the other into a tensor."""
        return self.allgather([output], [input])

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
        targets = t.checked(targets, call.where, count=self._ranks, is_written=True)
        sources = t.checked(sources, call.where, count=self._ranks, dtype=targets[0].dtype)
        elements = t.flat(t.together(sources if whole is None else whole))
        target_counts = [target.numel() for target in targets]
        received, _ = self.communicator.exchange(
            call,
            t.in_bytes(elements),
            [source.numel() for source in sources],
            elements.element_size(),
            target_counts,
            values=t.values_of(alike or [elements[:0]]),
            destination=destination,
        )
        t.write(t.from_bytes(received, elements).split(target_counts), targets)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the tensor of rank r into the root's r-th output; all have one size."""
        return self._with_root("gather", inputs, outputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Write the root's r-th input into the output of rank r; all have one size."""
        return self._with_root("scatter", outputs, inputs, opts)

    def _with_root(self, name: str, own_tensors: Any, lists: Any, opts: Any) -> Any:
        """Move a tensor of every rank into the root's list of tensors ("gather"), or out of it ("scatter")."""
        with self._in_turn(), self._call(name) as call:
            root = collectives.checked_root(opts.rootRank, self._ranks, call.where)
            [own] = t.checked(own_tensors, call.where, is_written=name == "scatter")
            nothing = own.new_empty(0)
            alone = [own if rank == root else nothing for rank in range(self._ranks)]
            parts = (
                t.checked(lists[0], call.where, numel=own.numel()) if self._rank == root else [nothing] * self._ranks
            )
            targets, sources = (parts, alone) if name == "gather" else (alone, parts)
            self._exchange(call, targets, sources, [own], f"rank {root}")
        return _completed_work(targets if name == "gather" else [own])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send the r-th input to rank r, and write the input of rank r into the r-th output; sizes may differ."""
        with self._in_turn(), self._call("all_to_all") as call:
            self._exchange(call, outputs, inputs)
        return _completed_work(list(outputs))

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> Any:
        """Send the r-th part of a tensor's first axis to rank r; without splits the parts are equal."""
        with self._in_turn(), self._call("all_to_all_single") as call:
            t.checked([output], call.where, is_written=True)
            targets = output.split(t.lengths(output, output_splits, self._ranks, call.where))
            sources = input.split(t.lengths(input, input_splits, self._ranks, call.where))
            self._exchange(call, targets, sources, whole=input)
        return _completed_work([output])

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
        targets = t.checked(tensors, where, is_written=receives)
        collectives.checked_root(peer or 0, self._ranks, where, "peer")
        if not 0 <= tag <= GREATEST_TAG:
            raise OptionError.at(where, found=f"tag {tag}", expected=f"an int from 0 to {GREATEST_TAG}")
        elements = t.flat(targets[0])
        # takes no turn: the reduction in the background, which has it, may wait for this message on another rank
        message = self.communicator.begin_message(t.in_bytes(elements), peer, tag, sends=not receives)
        return Transfer(self, message, [elements] if receives else (), targets if receives else ())

    def barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> Any:
        """Wait for all ranks of the group; after the timeout the late ranks are named, as in every call."""
        with self._in_turn(), self._call("barrier") as call:
            call.wait_as(None if opts is None else _chosen_seconds(opts.timeout))
            call.agree(call.where)
        return _completed_work([])

    monitored_barrier = barrier

    # ----------------------------------------------------------------------------------------- what torch asks for

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    # torch asks for these properties; in C++, some call themselves without end
    supports_splitting = supports_coalescing = supports_time_estimate = supports_tensor_alloc = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls wait for the other ranks."""
        self.communicator.guard.timeout = time_limit(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Free the group's communicators."""
        atexit.unregister(self._background.end)
        try:
            self._background.free()
        finally:
            self.communicator.free()
            _references[:] = [group for group in _references if group is not self]

    def abort(self) -> None:
        """Take no more calls."""
        self.communicator.guard.closed = True

    # what C++ cannot do for a group that is written in Python, up to torch 2.13
    #: The name that torch gives the group.
    group_name: str = ""
    _device_types: Any = (torch.device("cpu"), torch.device("cuda"))

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    _set_group_name = setGroupName

    def _get_backend(self, device: Any) -> Any:
        return self

    get_backend = _get_backend

    def get_group_store(self) -> Any:
        return self._store

    def _start_coalescing(self, device: Any) -> None:
        """Do nothing: each call of a coalescing manager is made at once."""

    def _end_coalescing(self, device: Any) -> Any:
        return _completed_work([])

    # the names before torch 2.13
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _make(options: Any, _: Any) -> Any:
    """Make the group that torch asks for: the default group, or a group of some ranks, which alone call this."""
    ranks = list(options.global_ranks_in_group)
    if ranks and not _references:
        raise ContextError.at(
            "torch.distributed.new_group",
            found="a default process group of another backend",
            expected=f'a default group of the backend "{NAME}", whose ranks are those of MPI',
            fix=_FORM,
        )
    whole: Any = _references[0].communicator if ranks else _chosen_strategy().extended.communicator
    if not ranks and (whole.rank, whole.size) != (options.group_rank, options.group_size):
        raise LaunchError.at(
            _WHERE,
            found=f"rank {options.group_rank} of {options.group_size} (RANK and WORLD_SIZE of the environment?)",
            expected="this rank's number, and the number of ranks, of MPI",
            fix=_FORM,
        )
    group = ProcessGroupMPI(whole.part(ranks) if ranks else whole.duplicate(), options.store)
    if _chosen_seconds(options.timeout):
        group.set_timeout(options.timeout)
    _references[:] = [*(_references if ranks else ()), group]  # torch 2.4 does not say when former groups are destroyed
    return group


@functools.cache
def _strategy_of_all() -> Strategy:
    """Return the strategy of all default groups that are given none."""
    return MirroredStrategy()


def _chosen_strategy() -> Strategy:
    """Return the strategy whose ranks the next default group has."""
    if dist.is_torchelastic_launched():
        raise LaunchError.at(
            _WHERE,
            found="a program that torchrun has started",
            expected="ranks of MPI",
            fix="Start it with `mpiexec -n 4 python program.py`, or with srun: torchrun is not needed.",
        )
    strategy = _pending.pop() if _pending else _strategy_of_all()
    if isinstance(strategy.extended.communicator, Alone) or strategy.extended.communicator.is_simulated:
        raise ContextError.at(
            _WHERE, found=f"{strategy!r:.60}, whose ranks are not MPI's", expected="a MirroredStrategy"
        )
    return strategy


def _rendezvous(url: str, timeout: timedelta | None = None, **more: Any) -> Iterator[tuple[Any, int, int]]:
    """Answer ``init_method="mpistrategy://"`` with a store that all ranks share, this rank and their number."""
    strategy = _chosen_strategy()
    communicator: Any = strategy.extended.communicator
    host = "127.0.0.1" if communicator.nodes == 1 else socket.gethostname()
    store = None
    with Call(communicator.guard, _WHERE, anywhere=True) as call:  # the other ranks hear of an error
        if communicator.rank == 0:  # it listens on a free port
            store = dist.TCPStore(host, 0, communicator.size, is_master=True, wait_for_workers=False)
        call.agree("make a store")
    host, port = communicator.allgather_text(f"{host} {store.port}" if store else "")[0].split()
    store = store or dist.TCPStore(host, int(port), communicator.size, is_master=False)
    _pending.append(strategy)
    yield store, communicator.rank, communicator.size


def init_process_group(strategy: Strategy | None = None, *, timeout: timedelta | float | None = None) -> None:
    """Make the ranks of a strategy the default process group of torch.distributed.  Collective.

    Afterwards DDP, FSDP, DTensor, `torch.distributed.checkpoint` and what else is made of process groups run over the
    strategy's MPI.  The environment needs neither MASTER_ADDR nor ports nor torchrun.  The group has messages of its
    own: collectives of the strategy may be made between torch's collectives.

    Args:
        strategy: whose ranks; None for a new MirroredStrategy of all ranks.
        timeout: how long a call waits for the other ranks before the roll call ends the job: a timedelta, or seconds;
            None for the strategy's.

    Raises:
        LaunchError: when the program was started by torchrun; as MirroredStrategy.
        ContextError: when there is a default process group already.

    >>> import torch, torch.distributed as dist, mpistrategy.torch as mst
    >>> mst.init_process_group()
    >>> dist.get_backend()
    'mpistrategy'
    >>> dist.destroy_process_group()
    """
    if dist.is_initialized():
        raise ContextError.at(
            _WHERE,
            found="a default process group",
            expected="none",
            fix="Call torch.distributed.destroy_process_group() before, or use the group that there is.",
        )
    _pending[:] = [] if strategy is None else [strategy]
    dist.init_process_group(
        NAME,
        init_method=f"{NAME}://",
        timeout=timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout,
    )


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
dist.register_rendezvous_handler(NAME, _rendezvous)
call_sites.pass_over(torch.__path__[0], typing_extensions.__file__)  # which decorates functions that are deprecated
# Without an init_method torch takes env://, and looks for RANK before it comes here.
exit_hooks.hints["using env:// rendezvous"] = _FORM
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = exit_hooks.show
