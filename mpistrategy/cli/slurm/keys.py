"""The keys of a job's statement, and what their values may look like.

The parser of a key returns the text for the script, or raises.

Values come from a command line (text) or from a site's profile (text, whole numbers, booleans, lists of texts).  They
end up in comments that a batch system reads, and in a shell script: so no value may begin a new line, and values for
a shell are quoted.  Whether a cluster has such a partition, feature, time limit or array: `sbatch --test-only` says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from mpistrategy.errors import OptionError
from mpistrategy.objects.shown import did_you_mean

#: Takes the given value and the name of the key.
Parse = Callable[[object, str], str]


def refuse(found: str, expected: str, fix: str = "") -> NoReturn:
    """Raise the error of the command."""
    raise OptionError.at("mpistrategy slurm", found=found, expected=expected, fix=fix)


def one_line(value: object, key: str) -> str:
    """Return a text without line ends, control characters and other characters that cannot be seen."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        refuse(f"{key}={value!r}", "a text")
    text = str(value)
    if not (text and text.isprintable() and text == text.strip()):
        refuse(f"{key}={value!r}", "one line of characters that can be seen, without blanks around it")
    return text


def matching(pattern: str, expected: str) -> Parse:
    """Return a check for texts that match a pattern as a whole."""

    def parse(value: object, key: str) -> str:
        text = one_line(value, key)
        if not re.fullmatch(pattern, text, re.ASCII):
            refuse(f"{key}={value!r}", expected)
        return text

    return parse


#: A word for the batch system, which splits its lines at blanks and takes quotes apart.
word: Parse = matching(
    r"(?!-)[^\s\"'\\#$`]+", "a word without blanks, quotes, backslashes, #, $ and `, not beginning with -"
)
number: Parse = matching(r"[0-9]{1,9}", "a whole number")
positive_number: Parse = matching(r"0*[1-9][0-9]{0,8}", "a whole number from 1 on")
time: Parse = matching(r"[0-9]{1,6}:[0-5][0-9]:[0-5][0-9]", "H:MM:SS, as 2:00:00")
gpus: Parse = matching(
    r"(?:[^\s:\"'\\#$`-][^\s:\"'\\#$`]*:)?[0-9]{1,9}", "a number, or a type and a number such as a100:4"
)


def choice(*eligible: str) -> Parse:
    """Return a check for one of some words; of "true" and "false", a boolean is one, too."""

    def parse(value: object, key: str) -> str:
        text = str(value).lower() if isinstance(value, bool) else one_line(value, key)
        if text not in eligible:
            refuse(f"{key}={value!r}", f"one of {', '.join(eligible)}", did_you_mean(text, eligible))
        return text

    return parse


def in_seconds(limit: str) -> int:
    """Return the seconds of a limit."""
    hours, minutes, seconds = map(int, limit.split(":"))
    return hours * 3600 + minutes * 60 + seconds


def path(value: object, key: str) -> str:
    """Return the path of a file as a word of the shell; a leading ~/ is the home folder."""
    text = one_line(value, key)
    if re.search(r"[$`]|^-|^~(?!/)", text):
        fix = "Nothing is expanded but a leading ~/; write the whole path out. Put ./ before a -."
        refuse(f"{key}={value!r}", "a path as it is", fix)
    if text.startswith("~/"):
        return '"$HOME"/' + (shlex.quote(text[2:]) if text[2:] else "")
    return shlex.quote(text)


def parts(value: object, key: str) -> list[str]:
    """Return a list of texts; one text is split like a command line."""
    try:
        split = value if isinstance(value, list) else shlex.split(one_line(value, key))
    except ValueError as error:
        refuse(f"{key}={value!r}", "words as on a command line", f"{error}.")
    return [one_line(part, key) for part in split]


def words(value: object, key: str) -> str:
    """Return a list of texts as words of the shell."""
    return " ".join(map(shlex.quote, parts(value, key)))


def options(value: object, key: str) -> str:
    """Return further options for the batch system, as --name or --name=value, separated by blanks."""
    option = matching(r"--(?!-)[^\s\"'\\#$`]+", "options such as --nice=10 or --contiguous")
    return " ".join(option(part, key) for part in parts(value, key))


def mounts(value: object, key: str) -> str:
    """Return folders for a container, FROM:TO, separated by commas, as one word of the shell."""
    return ",".join(path(part, key) for part in parts(value, key))


@dataclass(frozen=True)
class Key:
    """A key of the statement.

    Attributes:
        parse: checks a value, and returns the text for the script.
        summary: one line for the list of keys.
        slurm: the directive of Slurm, with {} for the value; "" for none.
        pbs: the directive of PBS.
    """

    parse: Parse
    summary: str
    slurm: str = ""
    pbs: str = ""


#: A key without a directive belongs to the templates that have a line ``key=``, or is named in `scripts`.
KEYS = {
    "job_name": Key(word, "the job's name", "--job-name={}", "-N {}"),
    "account": Key(word, "who pays", "--account={}", "-A {}"),
    "partition": Key(word, "which part of the cluster (PBS: the queue)", "--partition={}", "-q {}"),
    "qos": Key(word, "quality of service", "--qos={}"),
    "constraint": Key(word, "features that the nodes must have, e.g. gpu", "--constraint={}", "select"),
    "reservation": Key(word, "nodes reserved for you", "--reservation={}"),
    "nodes": Key(positive_number, "how many nodes [2]", "--nodes={}", "select"),
    "gpus_per_node": Key(
        gpus,
        "GPUs of each node, one rank for each, e.g. 4 or a100:4; 0 for none",
        "--gpus-per-node={}",
        "select",
    ),
    "gpu_option": Key(choice("gpus-per-node", "gres"), "how GPUs are asked for: gpus-per-node or gres"),
    "tasks_per_node": Key(
        positive_number,
        "ranks on each node [2]; as many as GPUs, where there are any",
        "--ntasks-per-node={}",
        "select",
    ),
    "cpus_per_task": Key(positive_number, "cores of each rank [1]", "--cpus-per-task={}", "select"),
    "memory": Key(word, "memory of each node, e.g. 64G; 0 for all of it", "--mem={}", "select"),
    "exclusive": Key(choice("true", "false"), "whether no other job may use the nodes", "--exclusive", "place"),
    "time": Key(time, "time limit, as 2:00:00 [00:10:00]", "--time={}", "-l walltime={}"),
    "mail_user": Key(word, "who gets mail about the job", "--mail-user={}", "-M {}"),
    "mail_type": Key(
        choice("NONE", "BEGIN", "END", "FAIL", "ALL"),
        "when: NONE, BEGIN, END, FAIL or ALL",
        "--mail-type={}",
        "-m {}",
    ),
    "output": Key(
        word, "where the job's output goes; %x name, %j number, %A_%a array and index", "--output={}", "-o {}"
    ),
    "array": Key(word, "indices, e.g. 0-9%2 for two at a time [0-3%2]", "--array={}", "-J {}"),
    "signal_lead": Key(
        positive_number,
        "seconds before the end at which the job is told [120]",
        "--signal=B:USR2@{}",
        "tell_after",
    ),
    "extra": Key(options, "further options for the batch system, e.g. --nice=10", "{}"),
    "mpi": Key(word, "how srun meets the MPI: pmi2, pmix, ...; none: as the cluster does"),
    "modules": Key(words, "environment modules to load, separated by blanks"),
    "venv": Key(path, "a Python environment to activate"),
    "program": Key(path, "the Python program [example.py]"),
    "arguments": Key(words, "its arguments"),
    "max_restarts": Key(number, "how often the job may be requeued [10]"),
    "max_links": Key(positive_number, "how many jobs the chain may have [10]"),
    "mpiexec": Key(
        choice("openmpi", "mpich", "intel", "pals"),
        "whose mpiexec starts the ranks: openmpi, mpich, intel, or pals (PBS) [openmpi]",
    ),
    "image": Key(path, "the container image"),
    "mounts": Key(mounts, "folders for the container, FROM:TO, separated by blanks"),
    "archive": Key(path, "the packed environment: a .tar.gz [environment.tar.gz]"),
    "local": Key(path, "a folder on every node's own disk [/tmp]"),
}
