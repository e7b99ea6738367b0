"""The fast network of this node, and whether NCCL can use it: what the system and the environment show.

NCCL itself speaks InfiniBand, also over Ethernet.  Slingshot and EFA it reaches by the plugin of OFI (aws-ofi-nccl),
which pip's NCCL is without: it then takes sockets, which are several times slower, and does not say so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path

#: The fabrics that NCCL needs a plugin for.
BY_PLUGIN = ("Slingshot", "EFA")
CURE = (
    "Load your cluster's module of aws-ofi-nccl, so that libnccl-net.so is on LD_LIBRARY_PATH, and export "
    "NCCL_NET='AWS Libfabric': NCCL then refuses to start without it"
)


def fabric(root: str = "/sys/class") -> str:
    """Return the fast network of this node: InfiniBand, RoCE, Slingshot or EFA; "" where none is seen."""
    if glob(f"{root}/cxi/*"):
        return "Slingshot"
    if any(os.path.basename(os.path.realpath(path)) == "efa" for path in glob(f"{root}/infiniband/*/device/driver")):
        return "EFA"
    layers = []
    for path in glob(f"{root}/infiniband/*/ports/*/link_layer"):
        with suppress(OSError):
            layers.append(Path(path).read_text(encoding="utf-8").strip())
    return "InfiniBand" if "InfiniBand" in layers else "RoCE" if layers else ""


def has_plugin(environment: Mapping[str, str], usual: tuple[str, ...] = ("/opt/amazon/ofi-nccl", "/usr")) -> bool:
    """Return whether the loader finds a network plugin of NCCL's."""
    wanted = environment.get("NCCL_NET_PLUGIN", "")
    if os.path.isabs(wanted):
        return os.path.exists(wanted)
    names = [f"libnccl-net{f'-{wanted}' if wanted else ''}.so", *([wanted] if wanted.endswith(".so") else [])]
    folders = [each for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    folders += [folder for root in usual for folder in glob(os.path.join(root, "lib*"))]
    return any(glob(os.path.join(folder, f"{name}*")) for folder in folders for name in names)
