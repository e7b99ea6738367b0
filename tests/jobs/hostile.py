"""Checkpoints and files of arrays that were made up to harm, and what reading them comes to.

The tests read a few hundred of them, scripts/soak hostile_files many thousands.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Training

import mpistrategy as ms
from mpistrategy.checkpoint.files import checksum_of
from mpistrategy.checkpoint.format import ABSENT, NAME, NOT_PLAIN, shard_name, with_head

#: Nothing may take longer: a second, with slack for a busy machine.
MOST_SECONDS = 5.0


@dataclass
class Figures:
    """What came of reading many files; `foreign` has what there is to complain of."""

    what: str
    read: int = 0
    fine: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    foreign: list[str] = field(default_factory=list)

    def add(self, title: str, call: Callable[[], object], most_seconds: float = MOST_SECONDS) -> bool:
        """Make a call, and note how it ends; return whether it came to a good end."""
        began, is_fine = time.monotonic(), False
        try:
            call()
            is_fine = True
        except ms.errors.MpiStrategyError as error:
            self.errors[type(error).__name__] += 1
        except Exception as error:
            self.foreign.append(f"{title}: {type(error).__name__}: {str(error)[-600:]}")
        seconds = time.monotonic() - began
        self.foreign += [f"{title}: {seconds:.1f} s"] * (seconds > most_seconds)
        self.read += 1
        self.fine += is_fine
        return is_fine

    def line(self) -> str:
        """Return the figures as a line."""
        kinds = ", ".join(f"{name} {count}" for name, count in self.errors.most_common())
        return (
            f"{self.read} {self.what}: {len(self.foreign)} are not as they should be; "
            f"{self.fine} could be read ({kinds or 'no errors'})"
        )


# ------------------------------------------------------------------------------------------------ mutations

#: What JSON may have in the place of anything.
VALUES: list[Callable[[random.Random], Any]] = [
    lambda dice: dice.choice([0, 1, -1, 2, 7, 63, 64, 65, 2**31, 2**32, 2**46, 2**53, 2**63, 2**64, 10**30, 10**400]),
    lambda dice: dice.choice([0.0, -0.5, 1e308, float("inf"), float("nan"), 1.5]),
    lambda dice: dice.choice(["", "x", "/", "../..", "\0", "\x1b[2J", "\u202e", "|O", "<f8", "a" * 5000, "é\ud800"]),
    lambda dice: dice.choice([None, True, [], {}, [[]], {"a": 1}, [1, 2, 3], {"dict": [[[], 1]]}]),
    lambda dice: [0] * dice.choice([1, 64, 65, 10**5]),
    lambda dice: json.loads("[" * (depth := dice.choice([5, 90, 200, 900])) + "]" * depth),
    lambda dice: {str(number): number for number in range(dice.choice([3, 1000]))},
    lambda dice: dice.choice(["variable", "array", "scalar", "plain", "rng", "streams", "iterator", "object"]),
    lambda dice: dice.choice(["variables", "optimizer", "accumulator", "dict", "list", "tuple", "one", "own", "SUM"]),
    lambda dice: dice.choice(["<i8", "<U5", "|S3", "<M8[s]", "bfloat16", "|b1", "<c16", "<f4", "<U1000000000"]),
]  # fmt: skip


def places_in(nest: Any) -> list[tuple[Any, Any]]:
    """Return where something stands in a nest of JSON: what holds it, and its key there."""
    found, waiting = [], [nest]
    for holder in waiting:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    return found


def mutated_json(content: Any, dice: random.Random) -> Any:
    """Change a nest of JSON in place at one to three places; return it."""
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        places = places_in(content)
        if not places:
            break
        (holder, key), (there, at) = dice.choice(places), dice.choice(places)
        value = dice.choice(VALUES)(dice)
        if dice.randrange(3) == 0:  # what stands elsewhere, or a list twice
            with contextlib.suppress(TypeError, RecursionError):
                value = json.loads(json.dumps(there[at])) * (1 + isinstance(there[at], list))
        if dice.randrange(6) == 0:
            del holder[key]
        elif isinstance(holder, dict):
            holder[dice.choice([key, key, str(at)])] = value
        else:
            holder[key : key + dice.randrange(2)] = [value]
    return content


def text_of(content: Any) -> bytes:
    """Return a nest as JSON, whatever is in it; one that is too deep for that as another deep one."""
    with contextlib.suppress(RecursionError):
        return json.dumps(content).encode(errors="surrogatepass")
    return b"[" * 2000 + b"]" * 2000


def mutated_bytes(data: bytes, dice: random.Random) -> bytes:
    """Return bytes that were changed somewhere."""
    at, stop = sorted(dice.randint(0, len(data)) for _ in range(2))
    some = dice.randbytes(dice.choice([1, 8, 100]))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)] if at < len(data) else b"") + data[at + 1 :],
        lambda: data[:at],
        lambda: data[at:],
        lambda: data[:at] + data[stop:],
        lambda: data[:at] + some + data[at:],
        lambda: data[:at] + some + data[at + len(some) :],
        lambda: data + some,
        lambda: data[:stop] + data[at:stop] + data[stop:],
        lambda: data.replace(b"0", b"9", dice.randint(1, 5)),
        lambda: (
            data[:at] + dice.choice([b"\0" * 64, b"\xff" * 8, b"[" * 5000, b'{"a":' * 500, b"[[]," * 10**5]) + data[at:]
        ),
        lambda: data[:8] + struct.pack("<Q", dice.choice([0, 2**63, 2**26, len(data)])) + data[16:],
        lambda: struct.pack("<Q", dice.choice([0, 1, 2**63, 2**26, 10**8, len(data), len(data) - 8])) + data[8:],
    ]
    return dice.choice(ways)()


# ------------------------------------------------------------------------------------------------ checkpoints


class Model:
    """An object that tells its own state, and takes any."""

    def __init__(self) -> None:
        self.state: Any = {"mask": np.arange(3), "epochs": 2}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Program(Training):
    """A small program with one of everything that a checkpoint can keep; in cross-replica context."""

    def __init__(self, strategy: ms.Strategy) -> None:
        super().__init__(strategy)
        self.step()
        self.checkpoint = ms.Checkpoint(
            **self.checkpoint.objects, old=np.random.RandomState(1), words=np.array(["a", "bc"]), model=Model(),
            nest={"w": self.weights, "x": [np.ones(2), {}]}, mixed=(1, {"a": None}),
        )  # fmt: skip

    def state(self) -> Any:
        """Return what must stay as it is when a checkpoint is refused."""
        return self.weights.numpy().tolist(), int(self.rows.local_copy()), repr(self.progress), self.adam.learning_rate

    def check(self) -> None:
        """Raise TypeError for what no checkpoint may put into the objects."""
        waiting: list[Any] = [self.checkpoint.objects, self.checkpoint.objects["model"].state]
        while waiting:
            one = waiting.pop()
            if one is ABSENT or one is NOT_PLAIN or type(one) is object:
                raise TypeError("a sentinel among the user's objects")
            if isinstance(one, (dict, list, tuple)):
                waiting += one.values() if isinstance(one, dict) else one
            draw_from(one)


def draw_from(one: object) -> None:
    """Draw from a generator of random numbers: a state that points elsewhere ends the process."""
    if isinstance(one, ms.Streams):
        draw_from(one.shared)
        draw_from(one.replica)
    elif isinstance(one, np.random.Generator):
        one.random(3)
        one.integers(9, size=3, dtype=np.int32)
    elif isinstance(one, np.random.RandomState):
        one.standard_normal(3)


def body_of(path: Path) -> Any:
    """Return what the manifest in a folder says."""
    _, _, body = (path / NAME).read_bytes().partition(b"\n")
    return json.loads(body)


def write_body(path: Path, content: Any) -> None:
    """Write a manifest whose checksum is right: what somebody with a purpose would do."""
    (path / NAME).write_bytes(with_head(text_of(content)))


def sign(path: Path, content: Any) -> None:
    """Write a manifest that has the sizes and the checksums of the shards as they are."""
    for number, shard in enumerate(content["shards"]):
        data = (path / shard_name(number)).read_bytes()
        shard[:2] = [len(data), checksum_of(data).hexdigest()]
    write_body(path, content)


def mutate_checkpoint(path: Path, dice: random.Random) -> str:
    """Change the checkpoint in a folder; return how."""
    way = dice.choice(["bytes", "signed bytes", "manifest", "manifest", "items in each other's place"])
    content, file = body_of(path), dice.choice(sorted(path.glob("shard-*")))
    if way == "bytes":
        file = dice.choice([file, path / NAME])
        file.write_bytes(mutated_bytes(file.read_bytes(), dice))
        return f"{way} of {file.name}"
    if way == "signed bytes":
        file.write_bytes(mutated_bytes(file.read_bytes(), dice))
    elif way == "manifest":
        write_body(path, mutated_json(content, dice))
        return way
    else:
        one, other = dice.sample(list(content["items"].values()), 2)
        first, last = dice.choice([(0, 1), (0, 6), (4, 6)])
        one[first:last], other[first:last] = other[first:last], one[first:last]
    sign(path, content)
    return f"{way} of {file.name}"


def read_checkpoints(program: Program, saved: Path, count: int, dice: random.Random) -> Figures:
    """Restore `count` mutations of the checkpoint `saved` of a program, and look at their arrays.  Of one rank.

    Each third is restored with partial=True.
    """
    figures = Figures("mutated checkpoint files")
    path = saved.with_name("mutated")
    program.checkpoint.restore(saved)
    kept = program.state()
    for number in range(count):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(saved, path)
        way = mutate_checkpoint(path, dice)
        if number % 4 == 0:
            figures.add(f"arrays of number {number}, {way}", lambda: _looked_at(ms.Checkpoint.arrays(path)))
        restore = functools.partial(program.checkpoint.restore, path, partial=number % 3 == 2)
        if figures.add(f"number {number}, {way}", restore):
            figures.add(f"objects of number {number}, {way}", program.check)
            program = Program(program.strategy)
            program.checkpoint.restore(saved)
        elif program.state() != kept:
            figures.foreign.append(f"number {number}, {way}: was refused, and has changed something")
            program.checkpoint.restore(saved)
    return figures


def _looked_at(arrays: dict[str, Any]) -> None:
    for array in arrays.values():
        _ = array.nbytes < 2**20 and array.tobytes()
