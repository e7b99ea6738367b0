"""Shapes of jobs, speeds and times, as the command line and the tables write them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

MOST_NODES, MOST_RANKS = 2**20, 2**10
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
#: Units of bytes a second, and of bits.
_SPEEDS = {f"{prefix}{unit}/s": factor * one for prefix, factor in _PREFIXES.items() for unit, one in
           (("b", 1.0), ("bit", 0.125))}  # fmt: skip
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"


@dataclass(frozen=True, order=True)
class Shape:
    """So many ranks on each of so many nodes."""

    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class LinkRates:
    """What `--link` says of the network; None for what it does not say."""

    bytes_per_second: float | None = None
    latency_seconds: float | None = None


def shape(text: str) -> Shape:
    """Return the shape that ``128x8`` means."""
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*x\s*([0-9]{1,9})\s*", text.lower())
    if found is not None:
        nodes, ranks = int(found[1]), int(found[2])
        if 2 <= nodes <= MOST_NODES and 1 <= ranks <= MOST_RANKS:
            return Shape(nodes, ranks)
    raise argparse.ArgumentTypeError(
        f"found {text!r}; expected NODESxRANKS of 2 to {MOST_NODES} nodes with 1 to {MOST_RANKS} ranks each, such as "
        "128x8"
    )


def link(text: str) -> LinkRates:
    """Return the network that ``25GB/s,2us``, ``100Gbit/s`` or ``2us`` means."""
    speeds, times = [], []
    for word in text.split(","):
        speed, time = _quantity(word, _SPEEDS), _quantity(word, _TIMES)
        if speed is None and time is None:
            raise argparse.ArgumentTypeError(
                f"found {word!r}; expected bytes or bits a second of a node's link, its latency, or both, such as "
                "25GB/s,2us or 100Gbit/s (kB, MB, GB, TB, kbit, Mbit, Gbit, Tbit; ns, us, ms, s)"
            )
        speeds += [] if speed is None else [speed]
        times += [] if time is None else [time]
    if len(speeds) > 1 or len(times) > 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected one speed and one latency, such as 25GB/s,2us")
    return LinkRates(speeds[0] if speeds else None, times[0] if times else None)


def duration(text: str) -> float:
    """Return the seconds that ``100ms`` means."""
    found = _quantity(text, _TIMES)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; expected a time with its unit, such as 100ms (ns, us, ms, s)"
        )
    return found


def speed_in_words(bytes_per_second: float) -> str:
    """Return ``25 GB/s``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"


def _quantity(text: str, units: dict[str, float]) -> float | None:
    """Return a positive number times its unit; None where the text is none."""
    found = re.fullmatch(_NUMBER + "([a-z/]+)", text.strip().lower())
    if found is None or found[2] not in units:
        return None
    value = float(found[1]) * units[found[2]]
    return value if 1e-12 < value < 1e18 else None
