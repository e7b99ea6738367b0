"""The estimates of the routes between nodes, and which route follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpistrategy.mpi.tuning import costs
from mpistrategy.mpi.tuning.costs import SECONDS, Route, between_nodes
from mpistrategy.mpi.tuning.thresholds import DEFAULT, Rates, Thresholds, default_for

pytestmark = pytest.mark.one_rank

KIB, MIB = 2**10, 2**20
#: A network of 25 GB/s and 2 us a message; a core copies or adds 10 GB/s.
FAST = replace(DEFAULT, rates=Rates(latency_seconds=2e-6, link_bytes_per_second=25e9))


def with_rates(thresholds: Thresholds, **rates: float) -> Thresholds:
    return replace(thresholds, rates=Rates(**{**vars(thresholds.rates), **rates}))


@pytest.mark.parametrize(
    ("route", "nodes", "nbytes", "expected"),
    [
        ("flat", 128, 10**8, 34e-3),
        ("lanes", 128, 10**8, 28e-3),
        ("pairwise", 128, 10**8, 68e-3),
        ("flat", 1250, 10**8, 34e-3),
        ("lanes", 1250, 10**8, 28e-3),
        ("pairwise", 1250, 10**8, 284e-3),
        ("flat", 128, 256 * KIB, 0.13e-3),
        ("pairwise", 128, 256 * KIB, 1.13e-3),
        ("pairwise", 1250, 256 * KIB, 10e-3),
    ],
)
def test_what_was_computed_by_hand_for_eight_ranks_a_node(
    route: Route, nodes: int, nbytes: int, expected: float
) -> None:
    assert SECONDS[route](nodes, 8, nbytes, FAST) == pytest.approx(expected, rel=0.06)


def test_the_algorithms_of_mpi_on_one_rank_of_each_node() -> None:
    """A short value takes log2 N messages; a long one crosses each link twice."""
    latency, link, add = 2e-6, 25e9, 1e10
    assert costs.flat_seconds(16, 1, 8, FAST) == pytest.approx(4 * latency, rel=0.01)
    long = 100 * MIB
    expected = 2 * long * 15 / 16 / link + long * 15 / 16 / add
    assert costs.flat_seconds(16, 1, long, FAST) == pytest.approx(expected, rel=0.01)


def test_the_ring_sends_within_nodes_and_between_them_at_once() -> None:
    long, copy, add = 1000 * MIB, 1e10, 1e10
    expected = 2 * long * 63 / 64 / copy + long * 63 / 64 / add
    assert costs.flat_seconds(8, 8, long, FAST) == pytest.approx(expected, rel=0.01)
    on_a_slow_link = with_rates(FAST, link_bytes_per_second=5e9)
    expected = 2 * long * 63 / 64 / 5e9 + long * 63 / 64 / add
    assert costs.flat_seconds(8, 8, long, on_a_slow_link) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("route", SECONDS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_more_bytes_and_slower_links_take_longer(route: Route, ranks: int) -> None:
    seconds = [SECONDS[route](4, ranks, size, FAST) for size in (0, 1, 64 * KIB, MIB, 4 * MIB, 96 * MIB)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    slow = with_rates(FAST, link_bytes_per_second=1e8)
    assert SECONDS[route](4, ranks, 96 * MIB, slow) > 10 * seconds[-1]


def test_ranks_share_cores_and_memory() -> None:
    whole = costs.lanes_seconds(2, 8, 64 * MIB, FAST)
    assert costs.lanes_seconds(2, 8, 64 * MIB, with_rates(FAST, cores=2)) > 3 * whole
    assert costs.lanes_seconds(2, 8, 64 * MIB, with_rates(FAST, memory_bytes_per_second=2e10)) > 3 * whole
    assert costs.lanes_seconds(2, 8, 64 * MIB, with_rates(FAST, cores=8)) == whole


def test_pieces_that_travel_while_others_are_added_up() -> None:
    """Above 4 MiB the longer of work and messages counts, and one piece of the other."""
    one = costs.lanes_seconds(8, 4, 4 * MIB, FAST) - FAST.rates.lanes_seconds
    sixteen = costs.lanes_seconds(8, 4, 64 * MIB, FAST) - FAST.rates.lanes_seconds
    assert 8 * one < sixteen < 15 * one


@pytest.mark.parametrize(
    ("nodes", "ranks", "nbytes", "thresholds", "route"),
    [
        (8, 1, 16 * MIB, DEFAULT, "flat"),
        (2, 8, 512 * KIB - 4, DEFAULT, "flat"),
        (2, 8, 512 * KIB, DEFAULT, "lanes"),
        (4, 2, 512 * KIB - 4, DEFAULT, "flat"),
        (4, 2, 512 * KIB, DEFAULT, "lanes"),
        (4, 4, MIB - 4, default_for("Open MPI v5.0.11"), "flat"),
        (4, 4, MIB, default_for("Open MPI v5.0.11"), "lanes"),
        (4, 2, MIB - 4, default_for("Open MPI v5.0.11"), "flat"),
        (1, 8, 16 * MIB, DEFAULT, "flat"),
        *((nodes, 4, size, FAST, "lanes") for nodes in (2, 4, 8, 1024) for size in (MIB, 4 * MIB, 16 * MIB)),
    ],
)
def test_the_route_without_measurements(
    nodes: int, ranks: int, nbytes: int, thresholds: Thresholds, route: Route
) -> None:
    assert between_nodes(nodes, ranks, nbytes, thresholds) == route


def test_the_pairwise_exchange_is_taken_where_it_was_measured_to_win() -> None:
    """With one rank on each node, on few nodes, from the measured threshold on."""
    rates = replace(DEFAULT.rates, measured_over_estimated=(("flat", 8 * MIB, 1.7), ("pairwise", 8 * MIB, 1.0)))
    measured = replace(DEFAULT, rates=rates)
    assert between_nodes(4, 1, 8 * MIB, measured) == "pairwise"
    assert between_nodes(8, 1, 8 * MIB, measured) == "pairwise"
    assert between_nodes(9, 1, 8 * MIB, measured) == "flat"
    assert between_nodes(4, 1, 8 * MIB, replace(measured, across_bytes=2**40)) == "flat"
    assert between_nodes(4, 1, measured.across_bytes - 4, measured) == "flat"


def test_what_was_measured_of_mpi_decides_between_flat_and_lanes() -> None:
    slow_lanes = replace(FAST.rates, measured_over_estimated=(("counterparts", MIB, 20.0),))
    assert between_nodes(4, 4, 4 * MIB, replace(FAST, rates=slow_lanes)) == "flat"
    slow_flat = replace(FAST.rates, measured_over_estimated=(("flat", MIB, 20.0),))
    assert between_nodes(1024, 2, 4 * MIB, replace(FAST, rates=slow_flat)) == "lanes"


def test_corrections_are_interpolated_between_sizes() -> None:
    points = (("flat", 64 * KIB, 1.0), ("flat", MIB, 4.0), ("pairwise", 1, 99.0))
    corrected = replace(FAST, rates=replace(FAST.rates, measured_over_estimated=points))
    sizes = (8, 64 * KIB, 256 * KIB, MIB, 16 * MIB)
    ratios = [costs.flat_seconds(4, 4, n, corrected) / costs.flat_seconds(4, 4, n, FAST) for n in sizes]
    assert ratios == pytest.approx([1, 1, 2.5, 4, 4])
