"""The networks that NCCL knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpistrategy.cli.doctor.facts import fabric

pytestmark = pytest.mark.one_rank


def test_fabrics_are_seen_and_so_is_a_plugin(tmp_path: Path) -> None:
    assert fabric.fabric(str(tmp_path)) == ""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    assert fabric.fabric(str(tmp_path)) == "RoCE"
    (port / "link_layer").write_text("InfiniBand\n")
    assert fabric.fabric(str(tmp_path)) == "InfiniBand"
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "infiniband" / "rdmap0" / "device").mkdir(parents=True)
    (tmp_path / "infiniband" / "rdmap0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    assert fabric.fabric(str(tmp_path)) == "EFA"
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    assert fabric.fabric(str(tmp_path)) == "Slingshot"
    assert not fabric.has_plugin({"LD_LIBRARY_PATH": str(tmp_path)}, ())
    (tmp_path / "libnccl-net.so").touch()
    assert fabric.has_plugin({"LD_LIBRARY_PATH": f"/none:{tmp_path}"}, ())
    assert not fabric.has_plugin({"LD_LIBRARY_PATH": str(tmp_path), "NCCL_NET_PLUGIN": "ofi"}, ())
