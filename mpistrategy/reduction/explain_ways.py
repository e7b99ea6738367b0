"""The routes of buffers, in words and figures: what is copied, what each rank writes or sends, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrategy.mpi.interface.communicator import Communicator
from mpistrategy.mpi.interface.gpu_transport import device_paths
from mpistrategy.mpi.multi_node import two_level
from mpistrategy.mpi.multi_node.reduced_precision import travels
from mpistrategy.mpi.shared_memory import pipelined
from mpistrategy.mpi.tuning.thresholds import Thresholds
from mpistrategy.options import CommunicationOptions
from mpistrategy.reduction.layout import packing

_ON_DEVICES = {
    "alone": "they stay where they are, on the only replica",
    "mpi": "MPI gets pointers to GPU memory",
    "staged": "through pinned memory of the host in chunks of 4 MiB, three of them under way",
    "nccl": "by NCCL, on the current stream",
    "ipc": "each GPU reads its peers' memory",
}


@dataclass(frozen=True)
class Buffer:
    """What is reduced in one piece.

    Attributes:
        kind: "pack" of several arrays, one "array", or "bucket" of an arena.
        dtype: in which it travels.
        nbytes: how long it is.
        arrays: how many are in it.
        way: a `mpistrategy.mpi.tuning.thresholds.Route`, "mailboxes" or "arena".
        is_copy: whether arrays are copied into it first.
        converted: whether they have another dtype.
        in_place: whether the result is written over it, and not elsewhere.
        rounds: whether float32 is bfloat16 between nodes.
        is_seen: whether the ranks of a node see each other's.
    """

    kind: str
    dtype: np.dtype[Any]
    nbytes: int
    arrays: int
    way: str
    is_copy: bool = False
    converted: bool = False
    in_place: bool = False
    rounds: bool = False
    is_seen: bool = False


@dataclass(frozen=True)
class Ground:
    """The ranks, as far as routes depend on them.

    Attributes:
        size: how many ranks there are.
        nodes: how many nodes.
        local_size: how many ranks this node has.
        lanes: how many ranks of each node talk to other nodes.
        is_shared: whether ranks of one node reduce through memory that they share.
        paths: thresholds and rates.
    """

    size: int
    nodes: int
    local_size: int
    lanes: int
    is_shared: bool
    thresholds: Thresholds

    @classmethod
    def of(cls, communicator: Communicator) -> Ground:
        """Return that of a communicator."""
        node_of = communicator.node_of
        return cls(
            communicator.size,
            communicator.nodes,
            node_of.count(node_of[communicator.rank]),
            two_level.lanes_of(node_of),
            communicator.shares_memory,
            communicator.thresholds,
        )

    def sent_between_nodes(self, buffer: Buffer) -> float:
        """Return the bytes that a node sends, and gets, of a buffer."""
        rounded = buffer.rounds and travels(buffer.dtype, "SUM")
        return 2 * (self.nodes - 1) / self.nodes * buffer.nbytes / (2 if rounded else 1)


def in_words(alike: Sequence[Buffer], ground: Ground) -> tuple[str, str, str]:
    """Return the route of buffers that take the same one, what is copied, and what each rank writes or sends."""
    first, nbytes = alike[0], sum(buffer.nbytes for buffer in alike)
    local, paths = ground.local_size, ground.thresholds
    size, part = size_in_words(nbytes), f"1/{local}"
    copies: list[tuple[float, str]] = []
    if first.converted:
        copies.append(
            (
                1,
                f"all into the {first.kind}, as {first.dtype.name}"
                if first.kind == "pack"
                else f"all into {first.dtype.name}",
            )
        )
    elif first.is_copy:
        copies.append((1, "all into the pack" if first.kind == "pack" else "all in order"))
    is_elsewhere = first.is_copy or first.converted or first.in_place
    result = [] if is_elsewhere else [(1.0, "all into the result")]
    match first.way:
        case "mailboxes":
            copies = [(1, "all into this rank's mailbox")]
            way = "in the ranks' mailboxes, with the check of the call"
            moved = f"each rank writes {size} and reads the mailboxes of all {ground.size}"
        case "arena":
            target = "into every one" if first.in_place else "into the node's one result"
            way = f"where the arrays are, each rank {part} of them"
            written = nbytes if first.in_place else nbytes / local
            moved = f"each rank reads {size} and writes {size_in_words(written)}, {target}"
        case "pipelined":
            chunk = pipelined.chunk_bytes_for(local, paths.chunk_bytes)
            way = f"through the node's bounce buffers, in {_pieces(alike, chunk, 'chunk')}"
            if nbytes >= pipelined.LEAST_BYTES and local <= pipelined.MOST_RANKS and ground.nodes == 1:
                way += f", or of {size_in_words(pipelined.LARGE_BYTES)} while these are faster"
            copies += [
                ((local - 1) / local, f"{local - 1}/{local} into the bounce buffers"),
                (1, "the result out of it"),
            ]
            read = size_in_words(2 * (local - 1) / local * nbytes)
            moved = f"each rank writes {size} there and reads {read}"
        case "result_buffers":
            way = f"in result buffers that the node shares, each rank {part} of them"
            copies.append(((local - 1) / local, f"{local - 1}/{local} into this rank's result buffer"))
            moved = f"each rank reads {size} and writes {size}, into every result buffer"
        case "across":
            piece = two_level.piece_bytes_for(ground.lanes, ground.nodes, paths)
            rounded = first.rounds and travels(first.dtype, "SUM")
            sent = sum(map(ground.sent_between_nodes, alike))
            way = (
                f"within each node, between the {ground.nodes} nodes as {'bfloat16' if rounded else first.dtype.name}, "
                f"and back, in {_pieces(alike, piece, 'piece')}"
            )
            if local > 1 and not first.is_seen:
                copies += (
                    [(1, "all into the node's memory"), (1, "the result out of it")] if ground.is_shared else result
                )
            lanes = f"each node sends {size_in_words(sent)} and gets as much"
            moved = f"{lanes}, by {ground.lanes} of its ranks" if ground.lanes > 1 else f"{lanes}, by one rank"
        case "mpi":
            copies += result
            way = f"by MPI's Allreduce, in {_pieces(alike, paths.piece_bytes, 'piece')}"
            moved = f"each rank sends at least {size_in_words(2 * (ground.size - 1) / ground.size * nbytes)}"
        case "alltoallv":
            way = f"from rank to rank: each gets 1/{ground.size} of all values, combines them and sends the result"
            moved = f"each rank sends {size_in_words(2 * (ground.size - 1) / ground.size * nbytes)}"
        case "root":
            way = "by MPI's Reduce to one rank, and from there by Bcast"
            moved = f"each rank sends {size} or gets it, at least once"
        case "threads":
            way, moved = "between the threads of this process", ""
        case _:
            copies += result
            way, moved = "stays here, the only replica", ""
    if first.converted and first.way != "arena":
        copies.append((1, "the result back"))
    return way, _copies(copies), moved


def seconds_of(buffers: Sequence[Buffer], ground: Ground) -> float:
    """Return about how long the reduction of these takes, with the check of the call."""
    rates = ground.thresholds.rates
    call = rates.cell_seconds if ground.nodes == 1 else rates.message_seconds
    return call + sum(_seconds(buffer, ground) for buffer in buffers)


def _seconds(buffer: Buffer, ground: Ground) -> float:
    nbytes, rates = buffer.nbytes, ground.thresholds.rates
    copy = nbytes / rates.copy_bytes_per_second
    before = copy * (buffer.is_copy + buffer.converted)
    link = ground.sent_between_nodes(buffer) / rates.link_bytes_per_second
    pipelined, in_arena = nbytes / rates.window_bytes_per_second, nbytes / rates.arena_bytes_per_second
    within = 0 if ground.local_size == 1 else in_arena if buffer.is_seen else pipelined
    match buffer.way:
        case "mailboxes":
            return ground.size * copy
        case "arena":
            return in_arena
        case "pipelined":
            return before + pipelined
        case "result_buffers":
            return before + copy * (1 - 1 / ground.local_size) + in_arena
        case "across":  # one piece is on the network while the node works on the next
            return before + rates.message_seconds + max(link, within)
        case "mpi" | "root" | "alltoallv":
            by_mpi = nbytes / rates.mpi_bytes_per_second if ground.nodes == 1 else rates.message_seconds + link
            return (before or copy) + by_mpi * (2 if buffer.way == "root" else 1)
        case _:
            return before + ground.size * copy


def size_in_words(nbytes: float) -> str:
    """Return a number of bytes in a unit that fits."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes:.0f} bytes"


def time_in_words(seconds: float) -> str:
    """Return a time with two digits."""
    unit, factor = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= each[1]), ("us", 1e-6))
    return f"{float(f'{seconds / factor:.2g}'):g} {unit}"


def _pieces(buffers: Sequence[Buffer], nbytes: int, what: str) -> str:
    step = max(1, nbytes // buffers[0].dtype.itemsize) * buffers[0].dtype.itemsize
    count = sum(-(-buffer.nbytes // step) for buffer in buffers)
    return f"{count} {what}{'' if count == 1 else 's'} of at most {size_in_words(nbytes)}"


def _copies(copies: Sequence[tuple[float, str]]) -> str:
    total = f"{sum(amount for amount, _ in copies):.3g}"
    if not copies:
        return "no copies"
    return f"{total} {'copy' if total == '1' else 'copies'}: {', '.join(text for _, text in copies)}"


def lines_of(
    communicator: Communicator,
    arrays: Sequence[Any],
    word: str | None,
    options: CommunicationOptions,
    num_packs: float = 0,
) -> list[str]:
    """Return what happens to arrays in GPU memory.

    Args:
        communicator: the ranks.
        arrays: the arrays; CuPy's, or their stand-ins with dtype, shape and nbytes.
        word: the path that is asked for, None where they go by way of the host.
        options: hints.
        num_packs: the algorithm's.
    """
    if not arrays:
        return []
    count = f"{len(arrays)} array{'s' * (len(arrays) > 1)} on a GPU, {size_in_words(sum(a.nbytes for a in arrays))}"
    if word is None:
        return [f"{count}: copied to the host, reduced as other arrays are, and copied back"]
    packs = packing.plan(packing.layouts_of(arrays), options.bytes_per_pack, num_packs)
    paths = device_paths(communicator)
    path, reason = paths.known.get(word), paths.reasons.get(word, "")
    if path is None:
        how = "on a path that the ranks choose at the first such call"
    else:
        how = f"{_ON_DEVICES[path.name]} ({path.name}: {reason})"
    return [f"{count}: packed on the GPU into {len(packs)} bucket{'s' * (len(packs) > 1)}; {how}"]
