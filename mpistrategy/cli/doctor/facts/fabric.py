"""The fast network of this node, and whether NCCL can use it: what the system and the environment show.

NCCL itself speaks InfiniBand, also over Ethernet.  Slingshot and EFA it reaches by the plugin of OFI (aws-ofi-nccl),
which pip's NCCL is without: it then takes sockets, which are several times slower, and does not say so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import glob

#: The fabrics that NCCL needs a plugin for.
BY_PLUGIN = ("Slingshot", "EFA")
CURE = (
    "Load your cluster's module of aws-ofi-nccl, so that libnccl-net.so is on LD_LIBRARY_PATH, and export "
    "NCCL_NET='AWS Libfabric': NCCL then refuses to start without it"
)


def fabric(root: str = "/sys/class") -> str:
    """Return the fast network of this node: InfiniBand, RoCE, Slingshot or EFA; "" where none is seen."""
    if glob(os.path.join(root, "cxi", "*")):
        return "Slingshot"
    found = ""
    for device in sorted(glob(os.path.join(root, "infiniband", "*"))):
        driver = os.path.basename(os.path.realpath(os.path.join(device, "device", "driver")))
        if driver == "efa":
            return "EFA"
        for port in glob(os.path.join(device, "ports", "*", "link_layer")):
            try:
                with open(port, encoding="utf-8") as file:
                    layer = file.read().strip()
            except OSError:
                continue
            found = "InfiniBand" if layer == "InfiniBand" else found or "RoCE"
    return found


def has_plugin(environment: Mapping[str, str], usual: tuple[str, ...] = ("/opt/amazon/ofi-nccl", "/usr")) -> bool:
    """Return whether the loader finds a network plugin of NCCL's."""
    wanted = environment.get("NCCL_NET_PLUGIN", "")
    if os.path.isabs(wanted):
        return os.path.exists(wanted)
    names = [f"libnccl-net{f'-{wanted}' if wanted else ''}.so", *([wanted] if wanted.endswith(".so") else [])]
    folders = [each for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each]
    folders += [folder for root in usual for folder in glob(os.path.join(root, "lib*"))]
    return any(glob(os.path.join(folder, f"{name}*")) for folder in folders for name in names)
