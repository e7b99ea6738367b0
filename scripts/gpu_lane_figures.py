"""The steps of scripts/gpu_lane that measure: each figure stands beside its limit, and is judged on a GPU only."""

from __future__ import annotations

import json
from typing import Any

from gpu_lane_jobs import ELSEWHERE, NOT_RUN, RIGHT, ROOT, WRONG, Lane, Row

#: Of a copy of as many bytes, by list of arrays.
PACKING_SHARES = {"resnet50": 0.8, "a scalar first": 0.6}
#: A sum of 4 KiB by NCCL, in seconds; and a list's, beside NCCL's own call for as many bytes.
NCCL_SMALL, NCCL_LIST = 40e-6, 1.2
#: What nccl-tests find on H100s; only told, because it is not ours.
NCCL_ALONE = "NCCL's own: 4096 bytes 15 us, on 8 GPUs 64 MiB 0.35 to 0.40 ms"
#: The host's time for a call beside torch.distributed's for the same, on one rank.
HOST_TORCH = 1.2
#: Adam's step beside torch's fused one; where there is no torch, beside a copy of the bytes that it must move.
ADAM_TORCH, ADAM_COPY = 1.3, 1.5


def rate(nbytes: float) -> str:
    """Return bytes a second in words."""
    return f"{nbytes / 1e9:.0f} GB/s" if nbytes >= 1e11 else f"{nbytes / 1e9:.1f} GB/s"


def judged(lane: Lane, row: Row, found: float, most: float, what: str) -> None:
    """Note that a row is wrong, and why, where a figure of a GPU is above its limit."""
    if lane.is_measured and found > most:
        row.result = WRONG
        row.text += f" ({what} is above its limit)"


def figures(
    lane: Lane, row: Row, part: str, ranks: int, limit: float, script: str = "gpu_figures.py", not_on_double: str = ""
) -> Any:
    """Measure one part; return its figures, or None when it failed, or when the double does not have what it takes."""
    if lane.double and not_on_double:
        row.result, row.text = NOT_RUN, not_on_double
        return None
    file = lane.work / f"{part}.json"
    arguments = [ROOT / "scripts" / script, file, *([part] if script != "gpu_host_time.py" else [])]
    ended = lane.ranks(row.name, ranks, arguments, limit)
    if ended.status != 0 or not file.exists():
        row.result, row.text = WRONG, ended.why
        return None
    read = json.loads(file.read_text())
    lane.measured[part] = row.figures = read[part] if script == "gpu_figures.py" else read
    row.result = RIGHT
    return row.figures


def limits(lane: Lane, row: Row) -> None:
    """The limits: what the device and the bus can do."""
    row.limit = "an H100's memory: 2.6 to 2.9 TB/s; an H200's: 4.2"
    found = figures(lane, row, "limits", 2, 60)
    if found:
        row.text = "; ".join(f"{name}: {rate(value)}" for name, value in found.items())
        row.text += " (two ranks at a time)"


def packing(lane: Lane, row: Row) -> None:
    """The packing kernel beside a plain copy."""
    row.limit = "; ".join(f"{name}: at least {share:.0%} of a copy" for name, share in PACKING_SHARES.items())
    found = figures(lane, row, "packing", 1, 60)
    if not found:
        return
    row.text = "; ".join(
        f"{name}: {rate(each['packing'])}, {each['packing'] / each['copy']:.0%} of a copy; "
        f"back {each['scattering'] / each['copy']:.0%}; "
        f"{each['seconds of the host for a call'] * 1e6:.0f} us of the host"
        for name, each in found.items()
    )
    for name, share in PACKING_SHARES.items():
        if name in found:
            judged(lane, row, share, found[name]["packing"] / found[name]["copy"], f"the time for {name}")


def check(lane: Lane, row: Row) -> None:
    """The packing kernel against NumPy."""
    found = figures(lane, row, "check", 1, 60)
    row.text = f"{found['lists that were right']} lists equal to NumPy's" if found else row.text


def path(lane: Lane, row: Row) -> None:
    """All-reduces on one path."""
    if row.name == "nccl":
        row.limit = f"4096 bytes: {NCCL_SMALL * 1e6:.0f} us; resnet50: {NCCL_LIST} times NCCL's own call; {NCCL_ALONE}"
    if row.name == "nccl" and not lane.double and lane.gpus < 2:
        row.result, row.text = ELSEWHERE, "for two GPUs: NCCL wants one for each rank"
        return
    # NCCL's figures are those of all GPUs; the others share one where there is no second.
    found = figures(lane, row, row.name, lane.gpus if row.name == "nccl" and not lane.double else 2, 60)
    if not found:
        return
    if found["path"] != [row.name]:
        row.result, row.text = NOT_RUN, f"not to be had here: {'; '.join(found['why'])}"
        return
    lane.paths.append(row.name)
    times = found["seconds"]
    parts = [f"{int(nbytes)} bytes: {seconds * 1e6:.0f} us" for nbytes, seconds in times.items() if nbytes.isdigit()]
    largest = max((int(nbytes) for nbytes in times if nbytes.isdigit()), default=0)
    speed = largest / times[str(largest)]
    bound = None if row.name == "nccl" else _bound(lane, row.name)
    row.text = "; ".join(parts) + f" = {rate(speed)}"
    if bound:
        row.limit = f"{bound[0]}: {rate(bound[1])}"
        row.text += f", {speed / bound[1]:.0%} of it"
    if "resnet50" in times:
        row.text += f"; resnet50: {times['resnet50'] * 1e3:.1f} ms"
    _compared(lane, row, times, largest)


def _compared(lane: Lane, row: Row, times: dict[str, float], largest: int) -> None:
    """Compare a path's figures with those of NCCL's own calls, and with those of the staged path."""
    if row.name == "nccl":
        own = {name.removeprefix("NCCL, "): seconds for name, seconds in times.items() if name.startswith("NCCL, ")}
        row.text += "; NCCL's own: " + ", ".join(f"{each} bytes {s * 1e6:.0f} us" for each, s in own.items())
        judged(lane, row, times["4096"], NCCL_SMALL, "the time for 4096 bytes")
        if "resnet50" in times:
            of_list = own[str(int(times["bytes of resnet50"]))]
            judged(lane, row, times["resnet50"], NCCL_LIST * of_list, "the time for resnet50")
    staged = lane.measured.get("staged")
    if row.name == "mpi" and staged and lane.is_measured and times[str(largest)] > staged["seconds"][str(largest)]:
        row.text += "; slower than staged, which mpistrategy doctor makes the choice then"


def _bound(lane: Lane, name: str) -> tuple[str, float] | None:
    """Return what a path cannot be faster than, for the bytes of one rank's array."""
    found = lane.measured.get("limits")
    if not found:
        return None
    if name == "staged":  # each byte goes there and back, both at the same time
        return "the bus", min(found["device to host, pinned"], found["host to device, pinned"])
    return "the device's copies", found["device copy, bytes read and written"] / 4


def nccl1(lane: Lane, row: Row) -> None:
    """NCCL on one rank: what our path adds to its call."""
    row.limit = f"4096 bytes: {NCCL_SMALL * 1e6:.0f} us"
    found = figures(lane, row, "nccl1", 1, 60, "gpu_kernels.py", "the double has no NCCL")
    if not found:
        return
    times = {int(name): each for name, each in found.items() if name.isdigit()}
    row.text = "; ".join(
        f"{nbytes} bytes: {each['ours'] * 1e6:.0f} us, NCCL's own call {each['NCCL'] * 1e6:.0f} us"
        for nbytes, each in times.items()
    )
    judged(lane, row, times[4096]["ours"], NCCL_SMALL, "the time for 4096 bytes")


def host(lane: Lane, row: Row) -> None:
    """The host's time for a call beside torch's by NCCL, and the functions of Python that it enters."""
    found = figures(lane, row, "host", 1, 60, "gpu_host_time.py", "the double is Python itself")
    if not found:
        return
    row.limit = f"{HOST_TORCH} times torch's by NCCL, where Python has it; functions: " + ", ".join(
        str(each["most_python_calls"]) for each in found.values()
    )
    row.text = "; ".join(
        f"{name}: {each['us']:.0f} us"
        + (f", torch {each['torch_us']:.0f} us" if "torch_us" in each else "")
        + f", {each['python_calls']} functions of Python"
        for name, each in found.items()
    )
    for name, each in found.items():
        if "torch_us" in each:
            judged(lane, row, each["us"], HOST_TORCH * each["torch_us"], f"the host's time for {name}")
        if each["python_calls"] > each["most_python_calls"]:  # counted: the same everywhere
            row.result = WRONG
            row.text += f" ({name} enters too many functions of Python)"


def optimizers(lane: Lane, row: Row) -> None:
    """Steps of 161 variables by one kernel."""
    row.limit = f"Adam: 7 passes; {ADAM_TORCH} times torch's fused, else {ADAM_COPY} times its bytes over a copy's rate"
    found = figures(lane, row, "optimizers", 1, 60, "gpu_kernels.py", "the double has no kernels of a GPU")
    if not found:
        return
    steps = {name: each for name, each in found.items() if isinstance(each, dict)}
    row.text = "; ".join(
        f"{name}: {each['seconds'] * 1e6:.0f} us, {each['passes']} passes at {each['of a copy']:.0%} of a copy's rate"
        for name, each in steps.items()
    )
    adam = steps["Adam"]
    if adam["passes"] > 7 or any(each.get("copied") for each in steps.values()):
        row.result = WRONG
        row.text += " (more passes of memory than the limit)"
    if found["torch"]:
        row.text += f"; torch's fused Adam: {found['torch'] * 1e6:.0f} us"
        judged(lane, row, adam["seconds"], ADAM_TORCH * found["torch"], "Adam's step")
    else:
        judged(lane, row, 1 / adam["of a copy"], ADAM_COPY, "Adam's step")


def hidden(lane: Lane, row: Row) -> None:
    """How much of an all-reduce goes by while the program computes."""
    if lane.double or lane.gpus < 2:
        row.result, row.text = ELSEWHERE, "for two GPUs: on one, computation and communication share it"
        return
    row.limit = "both at once: the longer of the two"
    found = figures(lane, row, "hidden", lane.gpus, 60, "gpu_kernels.py")
    if found:
        row.text = (
            f"products {found['compute'] * 1e3:.2f} ms, all-reduce {found['all-reduce'] * 1e3:.2f} ms, "
            f"both at once {found['both'] * 1e3:.2f} ms"
        )
        if lane.is_measured:
            row.text += f": {found['hidden']:.0%} hidden"


def bench(lane: Lane, row: Row) -> None:
    """What `mpistrategy bench --devices gpu` measures on all GPUs."""
    if lane.double:
        row.text = "the double is a part of tests, and the command finds no GPU"
        return
    file = lane.work / "bench.json"
    options = ["--quick", "--json", file]
    if not lane.is_measured:
        options += ["--sizes", "4KiB,64KiB", "--lists", "tiny1000", "--seconds", "0.02"]
    command = ["-m", "mpistrategy", "bench", "--devices", "gpu", *options]
    ended = lane.ranks(row.name, lane.gpus, command, 90)
    if ended.status != 0 or not file.exists():
        row.result, row.text = WRONG, ended.why
        return
    found = json.loads(file.read_text())
    row.result, row.figures = RIGHT, found
    largest = max((case for case in found["cases"] if case["suite"] == "all_reduce"), key=lambda case: case["bytes"])
    in_place = next(each for each in largest["variants"] if each["name"] == "mpistrategy out=")
    row.text = (
        f"{found['environment']['ranks']} ranks; all_reduce in place of {largest['bytes']} bytes: bus bandwidth "
        f"{in_place['bus_gb_s']:.3g} GB/s"
    )


def nodes(lane: Lane, row: Row) -> None:
    """What needs a second machine."""
    row.result = ELSEWHERE
    row.text = "for two nodes: mpistrategy bench --devices gpu and scripts/gpu_kernels.py FILE hidden, on both"
