"""The keys of a job's statement: the values of each, and where it is written."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrategy.cli.slurm import values


@dataclass(frozen=True)
class Key:
    """A key of the statement.

    Attributes:
        parse: checks a value, and returns the text for the script.
        summary: one line for the list of keys.
        slurm: the directive of Slurm, with {} for the value; "" for none.
        pbs: the directive of PBS.
    """

    parse: values.Parse
    summary: str
    slurm: str = ""
    pbs: str = ""


#: A key without a directive belongs to the templates that have a line ``key=``, or is named in `scripts`.
KEYS = {
    "job_name": Key(values.word, "the job's name", "--job-name={}", "-N {}"),
    "account": Key(values.word, "who pays", "--account={}", "-A {}"),
    "partition": Key(values.word, "which part of the cluster (PBS: the queue)", "--partition={}", "-q {}"),
    "qos": Key(values.word, "quality of service", "--qos={}"),
    "constraint": Key(values.word, "features that the nodes must have, e.g. gpu", "--constraint={}", "select"),
    "reservation": Key(values.word, "nodes reserved for you", "--reservation={}"),
    "nodes": Key(values.positive_number, "how many nodes [2]", "--nodes={}", "select"),
    "gpus_per_node": Key(
        values.gpus,
        "GPUs of each node, one rank for each, e.g. 4 or a100:4; 0 for none",
        "--gpus-per-node={}",
        "select",
    ),
    "gpu_option": Key(values.choice("gpus-per-node", "gres"), "how GPUs are asked for: gpus-per-node or gres"),
    "tasks_per_node": Key(
        values.positive_number,
        "ranks on each node [2]; as many as GPUs, where there are any",
        "--ntasks-per-node={}",
        "select",
    ),
    "cpus_per_task": Key(values.positive_number, "cores of each rank [1]", "--cpus-per-task={}", "select"),
    "memory": Key(values.word, "memory of each node, e.g. 64G; 0 for all of it", "--mem={}", "select"),
    "exclusive": Key(values.choice("true", "false"), "whether no other job may use the nodes", "--exclusive", "place"),
    "time": Key(values.time, "time limit: minutes, H:MM:SS or D-HH:MM:SS [00:10:00]", "--time={}", "-l walltime={}"),
    "mail_user": Key(values.word, "who gets mail about the job", "--mail-user={}", "-M {}"),
    "mail_type": Key(
        values.choice("NONE", "BEGIN", "END", "FAIL", "ALL"),
        "when: NONE, BEGIN, END, FAIL or ALL",
        "--mail-type={}",
        "-m {}",
    ),
    "output": Key(
        values.word, "where the job's output goes; %x name, %j number, %A_%a array and index", "--output={}", "-o {}"
    ),
    "array": Key(values.word, "indices, e.g. 0-9%2 for two at a time [0-3%2]", "--array={}", "-J {}"),
    "signal_lead": Key(
        values.positive_number,
        "seconds before the end at which the job is told [120]",
        "--signal=B:USR2@{}",
        "tell_after",
    ),
    "extra": Key(values.options, "further options for the batch system, e.g. --nice=10", "{}"),
    "mpi": Key(values.word, "how srun meets the MPI: pmi2, pmix, ...; none: as the cluster does"),
    "modules": Key(values.words, "environment modules to load, separated by blanks"),
    "venv": Key(values.path, "a Python environment to activate"),
    "program": Key(values.path, "the Python program [example.py]"),
    "arguments": Key(values.words, "its arguments"),
    "max_restarts": Key(values.number, "how often the job may be requeued [10]"),
    "max_links": Key(values.positive_number, "how many jobs the chain may have [10]"),
    "mpiexec": Key(
        values.choice("openmpi", "mpich", "intel", "pals"),
        "whose mpiexec starts the ranks: openmpi, mpich, intel, or pals (PBS) [openmpi]",
    ),
    "bind_to": Key(values.choice("core", "none"), "what mpiexec binds ranks to [core]"),
    "image": Key(values.path, "the container image"),
    "mounts": Key(values.mounts, "folders for the container, FROM:TO, separated by blanks"),
    "archive": Key(values.path, "the packed environment: a .tar.gz [environment.tar.gz]"),
    "local": Key(values.path, "a folder on every node's own disk [/tmp]"),
}
