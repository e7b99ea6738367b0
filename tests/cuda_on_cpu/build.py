"""Make the libraries in which a processor stands in for GPUs, so that the real CuPy runs without one.

CuPy asks four libraries for what it does: CUDA's driver and runtime, NVRTC, and cuBLAS; and NCCL, for those who use it.
Those made here do the same with memory of the host and threads in the place of streams (`streams.cpp`, `memory.cpp`),
compile kernels with g++ (`nvrtc.cpp`, `device_code.hpp`), and know as much of the others as tests need.  CuPy's wheels
have the runtime inside: `python/sitecustomize.py` makes them call this one.

It is for CuPy 14 of CUDA 13 on x86-64 Linux.  Sorting, random numbers and sparse matrices are not there.

    STANDIN_DEVICES    how many GPUs there are (1)
    STANDIN_MIB        the memory of each (4096)
    STANDIN_DELAY_US   how late everything on a stream is done: up to twice as long (0)
    STANDIN_KEEP       a folder for kernels that g++ does not take
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("counters", "devices", "streams", "memory", "driver", "driver_for_mpi", "nvrtc", "cublas", "nccl")
#: How CuPy and our own files ask for the libraries; all of them are one.
NAMES = (
    *("libcuda.so.1", "libcudart.so.13", "libnvrtc.so.13", "libnccl.so.2"),
    *("libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10"),
)
#: CuPy's own modules ask for symbols by these versions.
VERSIONS = "".join(f"lib{name} {{ global: {name.split('.')[0]}*; }};\n" for name in ("cublas.so.13", "curand.so.10"))
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror")


class CannotBuildError(RuntimeError):
    """Something is missing; the text says what."""


def headers() -> Path:
    """Return the folder of CUDA's headers: the packages nvidia-cuda-runtime and nvidia-cuda-crt bring them."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "cu13" / "include"
        if (folder / "cuda_runtime_api.h").exists() and (folder / "crt" / "host_defines.h").exists():
            return folder
    raise CannotBuildError("no headers of CUDA 13: pip install nvidia-cuda-runtime nvidia-cuda-crt")


def build(folder: Path) -> dict[str, str]:
    """Make the libraries in a new `folder`; return the environment in which CuPy finds them.

    Raises:
        CannotBuildError: without g++, CuPy or CUDA's headers, or when g++ fails.
    """
    compiler, symbols, cupy = shutil.which("g++"), shutil.which("nm"), importlib.util.find_spec("cupy_backends")
    if compiler is None or symbols is None:
        raise CannotBuildError("no g++ or no nm here: apt-get install g++")
    if cupy is None or cupy.origin is None:
        raise CannotBuildError("no CuPy: pip install cupy-cuda13x")
    include, libraries = headers(), folder / "lib64"
    libraries.mkdir(parents=True)
    (folder / "include").symlink_to(include)
    objects = [folder / f"{part}.o" for part in PARTS]
    _all(
        [compiler, *FLAGS, f"-I{include}", "-c", HERE / f"{part}.cpp", "-o", made]
        for part, made in zip(PARTS, objects, strict=True)
    )
    modules = [
        path for name in ("cublas", "curand") for path in Path(cupy.origin).parent.glob(f"cuda/libs/{name}.*.so")
    ]
    missing = _functions(symbols, "-Du", *modules) - _functions(symbols, "--defined-only", *objects)
    rest, versions = folder / "rest.cpp", folder / "versions"
    rest.write_text(
        "".join(f'extern "C" int {name}() {{ return 15; }}  // not supported\n' for name in sorted(missing))
    )
    versions.write_text(VERSIONS)
    library = libraries / "libstandin.so"
    link = [compiler, *FLAGS, "-shared", "-o", library, *objects, rest, f"-Wl,--version-script={versions}"]
    _all([[*link, "-ldl", "-pthread"]])
    for name in NAMES:
        (libraries / name).symlink_to(library.name)
    for header in ("kernel.hpp", "half.hpp", "device_code.hpp"):
        shutil.copy(HERE / header, libraries)
    return _environment(folder)


def build_once(parent: Path) -> dict[str, str]:
    """Make the libraries unless `parent` has them of the same sources; return the environment, as `build` does.

    Kernels that CuPy compiles are kept beside them.

    Raises:
        CannotBuildError: as `build` does.
    """
    sources = [each for each in sorted(HERE.iterdir()) if each.is_file()]
    said = "".join(each.name + each.read_text() for each in sources) + _version("cupy-cuda13x")
    made = parent / f"cuda-on-cpu-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=parent) as work:
            build(Path(work) / "made")
            with suppress(FileExistsError):  # another process was quicker
                (Path(work) / "made").rename(made)
    return {**_environment(made), "CUPY_CACHE_DIR": str(made / "kernels")}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _environment(folder: Path) -> dict[str, str]:
    libraries = folder / "lib64"
    return {
        "CUDA_PATH": str(folder),
        "LD_LIBRARY_PATH": ":".join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": ":".join(filter(None, [str(HERE / "python"), os.environ.get("PYTHONPATH")])),
        "CUPY_ACCELERATORS": "",  # CUB's own kernels are machine code of a GPU
    }


def _functions(command: str, which: str, *files: Path) -> set[str]:
    """Return what `files` have or want of cuBLAS and cuRAND."""
    listed = subprocess.run([command, which, *files], check=True, capture_output=True, text=True, timeout=60).stdout
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}
    return {name for name in names if name.startswith(("cublas", "curand"))}


def _all(commands: Iterable[Sequence[object]]) -> None:
    """Run commands at the same time."""
    jobs = [subprocess.Popen(list(map(str, each)), stderr=subprocess.PIPE, text=True) for each in commands]
    said = [job.communicate(timeout=300)[1] for job in jobs]
    for job, text in zip(jobs, said, strict=True):
        if job.returncode:
            raise CannotBuildError(text.strip()[-2000:] or f"{job.args} ended with {job.returncode}")
