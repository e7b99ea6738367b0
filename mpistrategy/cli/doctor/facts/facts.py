"""What each rank knows of itself, in plain values: the input of the checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from mpistrategy.mpi.gpu.cuda_aware import Outcome


@dataclass(frozen=True)
class Facts:
    """One rank.  It is sent as JSON; fields that another version of this package does not know are left out.

    Attributes:
        rank, size: its number, and how many MPI counts.
        host: the name of its node.
        python, mpistrategy, numpy, mpi4py, library: versions; of the MPI library with its name.
        built_for: the MPI that mpi4py was built for.
        libraries: the files of MPI libraries that the process has loaded.
        wanted: the library that MPI4PY_LIBMPI names, without symbolic links; "" for none.
        thread_level: what MPI was started with: single, funneled, serialized or multiple.
        mpi_seconds: how long MPI took to start.
        launcher, tasks, place, said: the launcher's name, how many processes it started (0: unknown), the number of
            this one, and the variables that say so.
        pmi: what the launcher offers for the ranks to meet: PMI, PMIx; empty for nothing.
        refusal: why the library would not start here, and what to type instead; empty when it would.
        leader, local_rank, local_size: by MPI: the first rank of its node, its local rank, the ranks there.
        local_hints: the local rank by the launcher's variables, by their names.
        cores: the cores that it may use.
        machine_cores: how many the node has.
        threads: how many threads linear algebra takes; 0 if unknown.
        threads_source: how that is known.
        room_free, room_of: how many bytes the ranks of this node may still share, and what limits them; "" if unknown.
        room_needed: what they share for each strategy.
        start_seconds: from the start of the process until this command ran: the imports.
        home: the folder of this package.
        sight: what it sees of GPUs, as `mpistrategy.mpi.gpu.inventory.Sight.text` has it; "" if not looked for.
        gpu_devices: how many GPUs the system of the node has device files for.
        amd: whether there are AMD's GPUs, which this library cannot use.
        gpus_promised: how many Slurm says that the job has on this node.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        cuda_refused: why no GPU memory is given to MPI; `cuda_trial.obstacle`.
        fabric: the fast network of the node; see `mpistrategy.cli.doctor.facts.fabric.fabric`.
        has_net_plugin: whether NCCL would find a network plugin.
        network, carrier: what messages between nodes go by, and which library below MPI sends them; see
            `mpistrategy.cli.doctor.facts.network`.
        from_pip: the package of pip that the MPI library belongs to.
        shm_free: how many bytes are free in /dev/shm; -1 if unknown.
        leftovers: what killed jobs have left on the node of a local rank 0, in words; "" for nothing.
    """

    rank: int = 0
    size: int = 1
    host: str = ""
    python: str = ""
    mpistrategy: str = ""
    numpy: str = ""
    mpi4py: str = ""
    library: str = ""
    built_for: str = ""
    libraries: Sequence[str] = ()
    wanted: str = ""
    thread_level: str = "multiple"
    mpi_seconds: float = 0.0
    launcher: str = ""
    tasks: int = 0
    place: int = 0
    said: str = ""
    pmi: Sequence[str] = ()
    refusal: Sequence[str] = ()
    leader: int = 0
    local_rank: int = 0
    local_size: int = 1
    local_hints: Mapping[str, int] = field(default_factory=dict)
    cores: Sequence[int] = ()
    machine_cores: int = 1
    threads: int = 0
    threads_source: str = ""
    room_free: int = 0
    room_of: str = ""
    room_needed: int = 0
    start_seconds: float = 0.0
    home: str = ""
    sight: str = ""
    gpu_devices: int = 0
    amd: bool = False
    gpus_promised: int = 0
    visible: str | None = None
    fabric: str = ""
    has_net_plugin: bool = False
    network: str = ""
    carrier: str = ""
    from_pip: str = ""
    shm_free: int = -1
    cuda_refused: str = ""
    leftovers: str = ""

    def text(self) -> str:
        """Return it as a text for rank 0."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Facts:
        """Return what `text` was made of."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


@dataclass(frozen=True)
class Job:
    """All that is known of a job.

    Attributes:
        facts: of each rank that answered, by its number.
        wanted_ranks: how many ranks there should be; 0 if not given.
        missing: the ranks that did not answer.
        patience: how many seconds the others waited for them.
        sums_right: whether a sum over the ranks was right; None if not tried.
        untried: why not.
        trial: what came of GPU memory given to MPI; None if not tried.
    """

    facts: Sequence[Facts]
    wanted_ranks: int = 0
    missing: Sequence[int] = ()
    patience: float = 0.0
    sums_right: bool | None = None
    untried: str = ""
    trial: Outcome | None = None

    @property
    def nodes(self) -> dict[int, list[Facts]]:
        """The ranks of each node, by the node's first rank."""
        found: dict[int, list[Facts]] = {}
        for each in self.facts:
            found.setdefault(each.leader, []).append(each)
        return found
