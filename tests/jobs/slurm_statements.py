"""Random statements of jobs for the tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

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
