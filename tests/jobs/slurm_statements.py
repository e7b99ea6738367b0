"""Random statements of jobs for the tests: good ones, and good ones with one mistake in them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mpistrategy.cli.slurm.keys import KEYS
from mpistrategy.cli.slurm.scripts import TEMPLATES, keys_of
from mpistrategy.cli.slurm.sites import Site

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,20}", fullmatch=True)
# What a path may be, with all that a shell would make something of.
PATHS = st.text(st.sampled_from("abz019_. -/'\"\\()&;|<>*?[]{}!#%^~äß"), min_size=1, max_size=20).filter(
    lambda text: text == text.strip() and not text.startswith(("-", "~"))
)
ARGUMENTS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12).filter(
    lambda text: not text.startswith("~/")
)
TIMES = st.one_of(
    st.integers(10, 5000),
    st.builds("{}:{:02}:{:02}".format, st.integers(1, 40), st.integers(0, 59), st.integers(0, 59)),
    st.builds("{}-{}".format, st.integers(1, 9), st.integers(0, 23)),
    st.builds("{}-{}:{:02}".format, st.integers(1, 9), st.integers(0, 23), st.integers(0, 59)),
)
#: Not of qos and reservation, which a cluster has to know.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "job_name": NAMES,
    "account": NAMES,
    "partition": st.just("test"),
    "constraint": st.sampled_from(["gpu", "fast", "gpu&fast", "gpu|fast", "[gpu|fast]"]),
    "nodes": st.integers(1, 1024),
    "gpus_per_node": st.integers(0, 4),
    "gpu_option": st.sampled_from(["gpus-per-node", "gres"]),
    "mail_user": st.sampled_from(["you@example.org", "you"]),
    "mail_type": st.sampled_from(["NONE", "BEGIN", "END", "FAIL", "ALL"]),
    "mpiexec": st.sampled_from(["openmpi", "mpich", "intel"]),
    "cpus_per_task": st.integers(1, 8),
    "memory": st.sampled_from(["0", "100", "64000M", "10G"]),
    "exclusive": st.booleans(),
    "time": TIMES,
    "output": st.sampled_from(["logs/%x-%j.out", "%A", "a;b&c.out"]),
    "mpi": st.sampled_from(["pmi2", "pmix", "cray_shasta", "none"]),
    "modules": st.sampled_from(["python", "python/3.11 openmpi", ["gcc/12", "cuda"]]),
    "venv": PATHS,
    "program": PATHS,
    "arguments": st.lists(ARGUMENTS, max_size=4),
    "extra": st.sampled_from(["--nice=10", "--contiguous --hint=nomultithread", ["--comment=x"], "--exclusive=user"]),
    "array": st.sampled_from(["0-9%2", "1,4,7", "0-1000:10", "5"]),
    "signal_lead": st.integers(1, 500),
    "max_restarts": st.integers(0, 50),
    "max_links": st.integers(1, 50),
    "bind_to": st.sampled_from(["core", "none"]),
    "image": PATHS,
    "mounts": st.sampled_from(["/data:/data", ["/a b:/c"], ["/x:/y:ro", "~/d:/e"]]),
    "archive": PATHS,
    "local": st.sampled_from(["/tmp", "/local scratch"]),
}


_MPIRUN, _OF_MPIRUN = "multi_node_mpirun", ("mpiexec", "bind_to")  # the latter are for PBS, too


@st.composite
def good(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a template and a statement that is right."""
    template = draw(st.sampled_from(sorted(TEMPLATES)))
    eligible = [
        key for key in keys_of(template, Site()) if key in VALUES and (template == _MPIRUN or key not in _OF_MPIRUN)
    ]
    keys = draw(st.lists(st.sampled_from(eligible), unique=True))
    statement = {key: draw(VALUES[key], label=key) for key in keys}
    if not statement.get("gpus_per_node") and draw(st.booleans()):
        statement["tasks_per_node"] = draw(st.integers(1, 8))
    return template, statement


_LINES = st.sampled_from(["\n", "\r", "\x00", "\x1b[2J", "\u2028", "\x85", "\u202e", "\ud800"])
#: What is wrong as a value of each key.
WRONG: dict[str, st.SearchStrategy[Any]] = {
    "job_name": st.sampled_from(["", " ", "a b", "-x", "$(id)", True]),
    "account": st.sampled_from(["a b", "a'b", "#"]),
    "partition": st.sampled_from(["gpu cpu", "`id`"]),
    "constraint": st.sampled_from(["gpu fast", '"gpu"']),
    "nodes": st.sampled_from([0, -1, "two", 1.5, "1-4", 10**9, True, None, "²", "٣"]),
    "gpus_per_node": st.sampled_from([-1, 65, "a100:", ":4", "a 100:4", "a100:65", ""]),
    "gpu_option": st.sampled_from(["", "gpus", "gres:gpu"]),
    "mail_user": st.sampled_from(["a b", "$USER", ""]),
    "mail_type": st.sampled_from(["all", "SOMETIMES", ""]),
    "mpiexec": st.sampled_from(["mvapich", "pals", ""]),
    "tasks_per_node": st.sampled_from([0, "x"]),
    "cpus_per_task": st.sampled_from([0, "8c"]),
    "memory": st.sampled_from(["64 G", "-1", 1.5]),
    "exclusive": st.sampled_from(["maybe", 2, None]),
    "time": st.sampled_from(["0", "1:30", "0:00:00", "-5", "1h", "1:2:3:4", "", 1.5]),
    "output": st.sampled_from(["a'b", 'a"b', "a\\b", "a#b", "$HOME/x", "-x"]),
    "mpi": st.sampled_from(["pmi 2", "--mpi"]),
    "modules": st.sampled_from(["'open", [1.5], {}]),
    "venv": st.sampled_from(["$HOME/venv", "~other/venv", "`pwd`", "-v"]),
    "program": st.sampled_from(["$x", "-c", " x", 1.5, ["a"]]),
    "arguments": st.sampled_from(["'open", [1.5], 1.5, {"a": 1}]),
    "extra": st.sampled_from(["-n4", "nice", "--x='a b'", "--a=$b"]),
    "array": st.sampled_from(["", "0 1", "-1", "$x"]),
    "signal_lead": st.sampled_from([0, "2m"]),
    "max_restarts": st.sampled_from([-1, "many"]),
    "max_links": st.sampled_from([0]),
    "bind_to": st.sampled_from(["socket", ""]),
    "image": st.sampled_from(["$image", "--nv"]),
    "mounts": st.sampled_from(["$HOME:/x", "-v", "~you/x:/x"]),
    "archive": st.sampled_from(["$x.tar.gz"]),
    "local": st.sampled_from(["$TMPDIR"]),
    "site": st.sampled_from(["atlantis", "../x", "no.toml", 3, ""]),
    "qos": st.sampled_from(["a b"]),
    "reservation": st.sampled_from(["a b"]),
}


@st.composite
def bad(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a template and a statement with one mistake."""
    template, statement = draw(good())
    eligible = ["site", *(key for key in keys_of(template, Site()) if template == _MPIRUN or key not in _OF_MPIRUN)]
    kind = draw(st.sampled_from(["template", "unknown", "elsewhere", "value", "line"]))
    if kind == "template":
        return draw(st.sampled_from(["", "multi-node", "../multi_node", "pbs", "signalled_run"])), statement
    if kind == "unknown":
        statement[draw(st.sampled_from(["node", "ntasks", "walltime", "", "Nodes", "nodes ", "template"]))] = 1
    elif kind == "elsewhere" and (others := sorted(set(KEYS) - set(eligible))):
        statement[draw(st.sampled_from(others))] = 1
    elif kind == "line":
        key = draw(st.sampled_from(eligible))
        statement[key] = f"{statement.get(key, 'x')}{draw(_LINES)}#SBATCH --wrap=id"
    else:
        key = draw(st.sampled_from([key for key in eligible if key in WRONG]))
        statement[key] = draw(WRONG[key])
    return template, statement
