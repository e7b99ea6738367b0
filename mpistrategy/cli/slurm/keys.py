"""The keys of a job's statement: the values of each, and the templates that use it."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrategy.cli.slurm import values

#: The templates, with a summary of each.
TEMPLATES = {
    "single_node": "one node, one rank for each of its GPUs",
    "multi_node": "several nodes: first mpistrategy doctor, then the program",
    "multi_node_mpirun": "the same with the MPI's own mpirun or mpiexec in place of srun",
    "requeue": "goes back to the queue before its time is up, and goes on from its newest checkpoint",
    "chain": "the same by jobs that wait for each other, where jobs cannot be requeued",
    "array": "one job for each of several settings, some at a time",
    "apptainer": "in an Apptainer (Singularity) container",
    "pyxis": "in a container of NVIDIA's pyxis and enroot",
    "staged_env": "copies the Python environment to every node's own disk first",
}
#: Those that there are for PBS as well.
ON_PBS = ("single_node", "multi_node", "requeue", "chain", "array")
_CONTAINERS = ("apptainer", "pyxis")
_MPIRUN = "multi_node_mpirun"
_ON_SRUN = tuple(name for name in TEMPLATES if name != _MPIRUN)


@dataclass(frozen=True)
class Key:
    """A key of the statement.

    Attributes:
        parse: checks a value.
        summary: one line for the list of keys.
        default: its value where none is given; None for no value.
        templates: those that use it; empty for all.
        but: those that do not.
    """

    parse: values.Parse
    summary: str
    default: values.Value | None = None
    templates: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def is_for(self, template: str) -> bool:
        """Return whether a template uses this key."""
        return template not in self.but and (not self.templates or template in self.templates)


#: To add a key, add one line here, and a line or a `@name@` where it is rendered.
KEYS = {
    "job_name": Key(values.word, "the job's name", "mpistrategy"),
    "account": Key(values.word, "who pays"),
    "partition": Key(values.word, "which part of the cluster (PBS: the queue)"),
    "qos": Key(values.word, "quality of service"),
    "constraint": Key(values.word, "features that the nodes must have, e.g. gpu"),
    "reservation": Key(values.word, "nodes reserved for you"),
    "nodes": Key(values.count(1), "how many nodes", but=("single_node",)),
    "gpus_per_node": Key(values.gpus, "GPUs of each node, one rank for each, e.g. 4 or a100:4; 0 for none", 0),
    "gpu_option": Key(values.choice("gpus-per-node", "gres"), "how GPUs are asked for: gpus-per-node or gres"),
    "tasks_per_node": Key(values.count(1), "ranks on each node; as many as GPUs, where there are any", 2),
    "cpus_per_task": Key(values.count(1), "cores of each rank", 1),
    "memory": Key(values.word, "memory of each node, e.g. 64G; 0 for all of it"),
    "exclusive": Key(values.switch, "whether no other job may use the nodes", False),
    "time": Key(values.time, "time limit: minutes, H:MM:SS or D-HH:MM:SS", "00:10:00"),
    "mail_user": Key(values.word, "who gets mail about the job"),
    "mail_type": Key(values.choice("NONE", "BEGIN", "END", "FAIL", "ALL"), "when: NONE, BEGIN, END, FAIL or ALL"),
    "output": Key(values.word, "where the job's output goes; %x name, %j number, %A_%a array and index"),
    "mpi": Key(values.word, "how srun meets the MPI: pmi2, pmix, ...; none: as the cluster does", templates=_ON_SRUN),
    "modules": Key(values.words, "environment modules to load, separated by blanks"),
    "venv": Key(values.path, "a Python environment to activate", but=(*_CONTAINERS, "staged_env")),
    "program": Key(values.path, "the Python program", "example.py"),
    "arguments": Key(values.words, "its arguments"),
    "extra": Key(values.options, "further options for the batch system, e.g. --nice=10"),
    "array": Key(values.word, "indices, e.g. 0-9%2 for two at a time", "0-3%2", templates=("array",)),
    "signal_lead": Key(
        values.count(1), "seconds before the end at which the job is told", 120, templates=("requeue", "chain")
    ),
    "max_restarts": Key(values.count(0), "how often the job may be requeued", 10, templates=("requeue",)),
    "max_links": Key(values.count(1), "how many jobs the chain may have", 10, templates=("chain",)),
    "mpiexec": Key(
        values.choice("openmpi", "mpich", "intel", "pals"),
        "whose mpiexec starts the ranks: openmpi, mpich, intel, or pals (PBS)",
        "openmpi",
        templates=(_MPIRUN, *ON_PBS),
    ),
    "bind_to": Key(values.choice("core", "none"), "what mpiexec binds ranks to", "core", templates=(_MPIRUN, *ON_PBS)),
    "image": Key(values.path, "the container image", templates=_CONTAINERS),
    "mounts": Key(values.paths, "folders for the container, FROM:TO, separated by blanks", templates=_CONTAINERS),
    "archive": Key(values.path, "the packed environment: a .tar.gz", "environment.tar.gz", templates=("staged_env",)),
    "local": Key(values.path, "a folder on every node's own disk", "/tmp", templates=("staged_env",)),
}


def keys_of(template: str) -> dict[str, Key]:
    """Return the keys that a template uses."""
    return {name: key for name, key in KEYS.items() if key.is_for(template)}
