"""What NVIDIA's driver is asked, with a driver made here; and that CuPy is imported only when it can be of use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mpistrategy.mpi.gpu import cuda_driver, inventory
from mpistrategy.mpi.gpu.cuda_driver import CudaDriver, NoGpus
from mpistrategy.mpi.gpu.inventory import Gpu

pytestmark = pytest.mark.one_rank

#: A driver with a whole GPU, and a part of another one; built with other results by -D.
SOURCE = """
#include <stdio.h>
#include <string.h>
#ifndef INIT
#define INIT 0
#endif
#ifndef COUNT
#define COUNT 2
#endif
static void fill(unsigned char *uuid, int first) { for (int i = 0; i < 16; i++) uuid[i] = first ? first + i : 0; }
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_MADE_HERE"; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 70; return index < COUNT ? 0 : 101; }
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    return snprintf(text, length, "0000:%02X:00.0", device) < length ? 0 : 1;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) { fill(uuid, device == 70 ? 1 : 0x30); return 0; }
#ifndef OLD
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { fill(uuid, device == 70 ? 1 : 0x40); return 0; }
int cuDeviceGetAttribute(int *value, int what, int device) {
    if (what != 134) return 1;
    *value = device == 70 ? 1 : -1;
    return 0;
}
#else
int cuDeviceGetAttribute(int *value, int what, int device) { return 1; }
#endif
"""
WHOLE = "01020304-0506-0708-090a-0b0c0d0e0f10"
PART = "40414243-4445-4647-4849-4a4b4c4d4e4f"
PARENT = "30313233-3435-3637-3839-3a3b3c3d3e3f"


def built(folder: Path, *options: str) -> Any:
    """Return the driver, built with these options of the C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "driver.c").write_text(SOURCE)
    path = folder / f"libcuda{'_'.join(options)}.so".replace("=", "")
    command = [compiler, "-shared", "-fPIC", *(f"-D{option}" for option in options)]
    subprocess.run([*command, "-o", path, folder / "driver.c"], check=True, timeout=60)
    return ctypes.CDLL(str(path))


def test_gpus_and_parts_of_gpus(tmp_path: Path) -> None:
    driver = CudaDriver(built(tmp_path))
    assert driver.count() == 2
    assert [driver.uuid(index) for index in range(2)] == [f"GPU-{WHOLE}", f"MIG-{PART}"]
    assert [driver.pci_bus_id(index) for index in range(2)] == ["0000:46:00.0", "0000:47:00.0"]
    assert [driver.numa_node(index) for index in range(2)] == [1, None], "of the driver, where sysfs has no such device"
    with inventory.seen_through(lambda: driver):
        assert inventory.look().gpus[0] == Gpu(0, f"GPU-{WHOLE}", "0000:46:00.0", 1)
    with pytest.raises(NoGpus, match=r"cuDeviceGet\(2\): CUDA_ERROR_MADE_HERE, 101"):
        driver.uuid(2)


def test_an_old_driver_knows_no_parts(tmp_path: Path) -> None:
    driver = CudaDriver(built(tmp_path, "OLD"))
    assert [driver.uuid(index) for index in range(2)] == [f"GPU-{WHOLE}", f"GPU-{PARENT}"]
    assert driver.numa_node(0) is None


def test_drivers_without_gpus(tmp_path: Path) -> None:
    assert CudaDriver(built(tmp_path, "INIT=100")).count() == 0, "CUDA_ERROR_NO_DEVICE"
    assert CudaDriver(built(tmp_path, "COUNT=0")).count() == 0
    with pytest.raises(NoGpus, match="does not work") as refusal:
        CudaDriver(built(tmp_path, "INIT=803"))
    assert "cuInit: CUDA_ERROR_MADE_HERE, 803" in refusal.value.reason
    assert refusal.value.is_strange


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda_that_is_nowhere.so.1")
    with pytest.raises(NoGpus, match="no NVIDIA driver here") as refusal:
        CudaDriver()
    assert not refusal.value.is_strange


# ------------------------------------------------------------------------------------- with CuPy


def cupy_that(count: Any) -> types.ModuleType:
    """Return a CuPy whose runtime counts GPUs so."""
    module: Any = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=count))
    return module  # type: ignore[no-any-return]


def old_driver() -> int:
    raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(tmp_path)
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda: CudaDriver(library))


def test_gpus_that_cupy_can_use(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy_that(lambda: 2))
    assert [gpu.index for gpu in inventory.look().gpus] == [0, 1]


@pytest.mark.parametrize(("count", "text"), [(old_driver, "cudaErrorInsufficientDriver"), (lambda: 1, "CuPy sees 1")])
def test_gpus_that_cupy_cannot_use(driver: None, monkeypatch: pytest.MonkeyPatch, count: Any, text: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy_that(count))
    sight = inventory.look()
    assert not sight.gpus
    assert sight.is_strange
    assert text in sight.reason
    assert "cupy-cuda12x" in sight.fix


def test_a_cupy_that_cannot_be_imported(driver: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (tmp_path / "cupy.py").write_text("raise OSError('libnvrtc.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "CuPy does not work here (OSError: libnvrtc.so.12" in inventory.look().reason


@pytest.mark.parametrize("option", ["INIT=100", "COUNT=0", None])
def test_cupy_is_not_imported_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str | None
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (tmp_path / "cupy.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    if option is None:
        monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda_that_is_nowhere.so.1")
    else:
        library = built(tmp_path, option)
        monkeypatch.setattr(cuda_driver, "CudaDriver", lambda: CudaDriver(library))
    sight = inventory.look()
    assert not sight.is_strange, sight
    assert ("no NVIDIA driver" if option is None else "no GPU that this process may use") in sight.reason


def test_the_driver_is_not_asked_where_there_is_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cupy" in sys.modules or __import__("importlib.util").util.find_spec("cupy"):
        pytest.skip("CuPy is here")
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda: pytest.fail("asked"))
    sight = inventory.look()
    assert sight.reason == "CuPy is not installed"
    assert not sight.is_strange
