"""Device strings: TensorFlow's spelling with the rank as task, and its short forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrategy import errors
from mpistrategy.arrays import devices
from mpistrategy.arrays.devices import Device
from mpistrategy.mpi.gpu.device_selection import Request, requested

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("/job:worker/replica:0/task:3/device:GPU:0", Device(3, "GPU", 0)),
        ("/job:worker/replica:0/task:12/device:CPU:5", Device(12, "CPU", 5)),
        ("/device:GPU:1", Device(None, "GPU", 1)),
        ("GPU:1", Device(None, "GPU", 1)),
        ("gpu:1", Device(None, "GPU", 1)),
        ("/gpu:1", Device(None, "GPU", 1)),
        ("CPU", Device(None, "CPU", None)),
        ("CPU:*", Device(None, "CPU", None)),
        ("task:3", Device(3, None, None)),
        ("/task:3", Device(3, None, None)),
        ("/task:3/CPU:0", Device(3, "CPU", 0)),
        ("/task:3/device:CPU:0", Device(3, "CPU", 0)),
        ("  CPU:0 ", Device(None, "CPU", 0)),
        ("/job:worker/task:1/cpu:0", Device(1, "CPU", 0)),
    ],
)
def test_the_forms_of_a_device_string(text: str, device: Device) -> None:
    assert devices.parse(text) == device


@given(st.integers(0, 10**6), st.sampled_from(["CPU", "GPU"]), st.integers(0, 1000))
def test_a_complete_device_survives_its_string(task: int, kind: str, index: int) -> None:
    device = Device(task, kind, index)
    assert str(device) == f"/job:worker/replica:0/task:{task}/device:{kind}:{index}"
    assert devices.parse(str(device)) == device


@pytest.mark.parametrize(
    "text",
    ["", " ", "/", "TPU:0", "CPU:", "CPU:-1", "CPU:a", "CPU:0:1", "task:", "task:-1", "task:x", "task:²", "task:1.5",
     "device:", "rank:0", "0", "GPU 0", "/job:worker/replica:x/task:0", "CPU:²"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(errors.DeviceError) as refusal:
        devices.parse(text)
    assert repr(text) in refusal.value.found
    assert "CPU:0" in refusal.value.expected


@pytest.mark.parametrize(
    ("pattern", "device", "matches"),
    [
        ("task:1", Device(1, "CPU", 0), True),
        ("task:1", Device(2, "CPU", 0), False),
        ("CPU:0", Device(2, "CPU", 0), True),
        ("CPU:0", Device(2, "CPU", 1), False),
        ("CPU", Device(2, "CPU", 1), True),
        ("GPU:0", Device(2, "CPU", 0), False),
        ("/job:worker/replica:0/task:2/device:CPU:1", Device(2, "CPU", 1), True),
        ("/job:worker/replica:0/task:2/device:CPU:1", Device(1, "CPU", 1), False),
    ],
)
def test_a_part_left_out_matches_everything(pattern: str, device: Device, matches: bool) -> None:
    assert devices.parse(pattern).matches(device) is matches


def test_a_rank_drives_the_entry_at_its_index_within_the_node() -> None:
    assert requested((), local_rank=1, local_size=2) == Request("cpu")
    assert requested(["GPU:2", "gpu"], local_rank=0, local_size=2) == Request("a list of GPUs", 2)
    assert requested(["GPU:2", "gpu"], local_rank=1, local_size=2) == Request("a list of GPUs", 0)


@pytest.mark.parametrize(
    ("wanted", "error", "named"),
    [
        (["CPU:0"], ValueError, "1 devices for 2 ranks"),
        (["CPU:0", "CPU:0"], ValueError, "'CPU:0' twice"),
        (["CPU:0", "cpu:0"], ValueError, "twice"),
        (["CPU", "CPU:0"], ValueError, "twice"),
        (["GPU:0"], ValueError, "1 devices for 2 ranks"),
        (["GPU:0", "CPU:1"], ValueError, "either CPUs or GPUs"),
        (["CPU:1", "CPU:99999"], ValueError, "99999"),
        (["", "CPU:0"], ValueError, "''"),
        ("CPU:0", TypeError, "'CPU:0'"),
        ({"CPU:0", "CPU:1"}, TypeError, "CPU"),
        ([0, 1], TypeError, "[0, 1]"),
        (7, TypeError, "7"),
    ],
)
def test_wrong_device_lists(wanted: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error) as refusal:
        requested(wanted, local_rank=1, local_size=2)
    assert isinstance(refusal.value, errors.MpiStrategyError)
    assert named in str(refusal.value)
