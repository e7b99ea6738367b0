"""JobSpec: one checked statement of a job, from which its script is rendered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpistrategy.cli.slurm import sites, values
from mpistrategy.cli.slurm.keys import KEYS, TEMPLATES, keys_of
from mpistrategy.errors import OptionError
from mpistrategy.objects.nearest import did_you_mean

_WHERE = "mpistrategy slurm"


@dataclass(frozen=True)
class JobSpec:
    """A checked statement: made by `JobSpec.of` only.

    Attributes:
        template: which script.
        site: for which cluster.
        given: the keys that were stated, in the order of `KEYS`.
        values: the values of all keys of the template; None where there is none.
    """

    template: str
    site: sites.Site
    given: frozenset[str]
    values: Mapping[str, values.Value | None]

    @classmethod
    def of(cls, template: str, statement: Mapping[str, object] | None = None) -> JobSpec:
        """Check a statement.

        Args:
            template: one of `TEMPLATES`.
            statement: values by key, and ``site``.

        Raises:
            OptionError: for keys that the template does not have, values that are not allowed, and values that do not
                fit together.
        """
        if template not in TEMPLATES:
            raise OptionError.at(
                _WHERE,
                found=f"the template {template!r}",
                expected=f"one of {', '.join(TEMPLATES)}",
                fix=did_you_mean(template, TEMPLATES),
            )
        statement = dict(statement or {})
        named = statement.pop("site", None)
        site = sites.GENERIC if named is None else sites.load(values.one_line(named, "site"))
        if site.templates and template not in site.templates:
            raise OptionError.at(
                _WHERE,
                found=f"the template {template!r} for the site {site.name}",
                expected=f"one of {', '.join(site.templates)}",
            )
        eligible = {key: each for key, each in keys_of(template).items() if key not in _without(site, template)}
        for key in statement:
            if key not in eligible:
                raise OptionError.at(
                    _WHERE,
                    found=f"the key {key!r}",
                    expected=f"keys of the template {template}: {', '.join(['site', *eligible])}",
                    fix="Others have it: another template, launcher or batch system."
                    if key in KEYS
                    else did_you_mean(key, ["site", *eligible]),
                )
        checked = {key: eligible[key].parse(given, key) for key, given in statement.items()}
        _refuse_skipped(site, checked)
        filled = {key: site.defaults.get(key, each.default) for key, each in eligible.items()} | checked
        filled = _derived(filled, checked, site)
        spec = cls(template, site, frozenset(checked), filled)
        _check(spec)
        return spec

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return int(self["nodes"] or 1)

    @property
    def gpus(self) -> int:
        """How many GPUs of a node; their type may be given, too."""
        return int(str(self["gpus_per_node"] or 0).rpartition(":")[2])

    @property
    def gpu_option(self) -> str:
        """How they are asked for; "" where the partition says it all."""
        return str(self["gpu_option"] or self.site.gpu_option) if self.site.gpu_option else ""

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return self.nodes * int(self["tasks_per_node"])

    def check_complete(self) -> None:
        """Raise OptionError unless everything is stated without which the site accepts no job."""
        missing = [key for key in self.site.requires if self.values.get(key) is None]
        if missing:
            raise OptionError.at(
                _WHERE,
                found=f"no {missing[0]}",
                expected=f"values for {', '.join(self.site.requires)}, which {self.site.name} wants",
                fix=f"Add {missing[0]}=... .",
            )


def _refuse_skipped(site: sites.Site, checked: Mapping[str, object]) -> None:
    """Raise OptionError for a key that a site does not take; cpus_per_task says how many threads a rank has, too."""
    for key in checked:
        if key in site.skip and key != "cpus_per_task":
            raise OptionError.at(
                _WHERE, found=f"{key}=", expected=f"no such key: {site.name} refuses jobs that have it"
            )


def _without(site: sites.Site, template: str) -> tuple[str, ...]:
    """Return the keys that have no meaning at a site."""
    if site.batch == "pbs":
        return ("qos", "reservation", "extra", "mpi", "gpu_option")
    mpiexec = ("mpiexec", "bind_to") if template != "multi_node_mpirun" else ()
    return mpiexec if site.launcher == "srun" else (*mpiexec, "mpi")


def _derived(filled: dict[str, Any], checked: Mapping[str, object], site: sites.Site) -> dict[str, Any]:
    """Fill in values that follow from others."""
    if "nodes" in filled and filled["nodes"] is None:
        filled["nodes"] = 1 if "array" in filled else 2
    if filled["gpus_per_node"] and "tasks_per_node" not in checked:
        filled["tasks_per_node"] = int(str(filled["gpus_per_node"]).rpartition(":")[2]) or filled["tasks_per_node"]
    if filled.get("output") is None and site.batch == "slurm":
        filled["output"] = "%x-%A_%a.out" if "array" in filled else "%x-%j.out"
    if filled["arguments"] is None:
        filled["arguments"] = ()
    return filled


def _check(spec: JobSpec) -> None:
    """Raise OptionError for values that do not fit together."""
    gpus, tasks, cpus, site = spec.gpus, spec["tasks_per_node"], spec["cpus_per_task"], spec.site
    if gpus and tasks != gpus:
        raise OptionError.at(
            _WHERE,
            found=f"tasks_per_node={tasks} and gpus_per_node={gpus}",
            expected="as many ranks as GPUs: a rank drives one",
            fix="Leave tasks_per_node out.",
        )
    if gpus > site.gpus:
        raise OptionError.at(
            _WHERE,
            found=f"gpus_per_node={gpus}",
            expected=f"at most {site.gpus} on {site.name}",
            fix="" if site.gpus else "Its GPUs are none that this library can use: leave gpus_per_node out.",
        )
    if site.cpus and tasks * cpus > site.cpus:
        raise OptionError.at(
            _WHERE,
            found=f"tasks_per_node={tasks} times cpus_per_task={cpus}",
            expected=f"at most {site.cpus} CPUs on a node of {site.name}",
        )
    lead = spec["signal_lead"]
    if lead is not None and lead >= values.in_seconds(spec["time"]):
        raise OptionError.at(
            _WHERE,
            found=f"signal_lead={lead} and time={spec['time']}",
            expected="a signal_lead in seconds that is less than the time limit",
        )
    _check_launcher(spec)
    for option in spec["extra"] or ():
        name, _, value = option[2:].partition("=")
        if name in _FREE and _FREE[name](spec.template, value):
            continue
        if name in _COVERED:
            instead = f"Write {_COVERED[name]}=... instead." if _COVERED[name] else "This script depends on its own."
            if name == "gres":
                instead = f"Write gpus_per_node={value.partition(':')[2] or 'NUMBER'} gpu_option=gres instead."
            raise OptionError.at(
                _WHERE,
                found=f"extra={option!r}",
                expected="options that no key stands for",
                fix=instead,
            )


def _check_launcher(spec: JobSpec) -> None:
    site = spec.site
    if spec["mpiexec"] == "pals" and site.batch != "pbs":
        raise OptionError.at(_WHERE, found="mpiexec=pals", expected="openmpi, mpich or intel: PALS is there under PBS")
    if site.batch == "pbs" and spec["array"] and not re.fullmatch(r"\d+-\d+(:\d+)?(%\d+)?", spec["array"]):
        raise OptionError.at(
            _WHERE,
            found=f"array={spec['array']!r}",
            expected="one range under PBS: FIRST-LAST, with :STEP and %MOST behind it or not",
        )
    if site.batch == "pbs" and spec["output"] and not _PBS_OUTPUT.fullmatch(spec["output"]):
        raise OptionError.at(
            _WHERE,
            found=f"output={spec['output']!r}",
            expected="under PBS a path of letters, digits and _ . / + -: qsub reads it as words, and replaces no %j",
            fix="Leave output out: PBS names the file after job and number.",
        )
    if site.batch == "pbs" and spec["constraint"]:
        _check_resources(spec["constraint"])
    if site.batch == "pbs" and spec["memory"] == "0":
        raise OptionError.at(
            _WHERE,
            found="memory=0",
            expected="an amount under PBS, such as 64G",
            fix="exclusive=true gives whole nodes.",
        )


_PBS_OUTPUT = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")
_PBS_RESOURCE = re.compile(r"([A-Za-z][A-Za-z0-9_]*)=[A-Za-z0-9_.@-]+")
#: What the script itself asks of each chunk, by the key that says it.
_OF_CHUNKS = {"ncpus": "cpus_per_task", "mpiprocs": "tasks_per_node", "ngpus": "gpus_per_node", "mem": "memory"}


def _check_resources(text: str) -> None:
    """Raise OptionError unless a constraint is what PBS takes in the chunks of a select line."""
    for part in text.split(":"):
        found = _PBS_RESOURCE.fullmatch(part)
        instead = _OF_CHUNKS.get(found[1], "") if found else ""
        if found is None or instead:
            raise OptionError.at(
                _WHERE,
                found=f"constraint={text!r}",
                expected="resources of a node under PBS, such as gpu_type=a100 or host=n17:arch=linux",
                fix=f"Write {instead}=... instead." if instead else "",
            )


#: Options of sbatch that are covered by a key, and yet have values, or templates, of which no key knows.
_FREE: dict[str, Callable[[str, str], bool]] = {
    "gres": lambda template, value: not value.startswith("gpu"),
    "exclusive": lambda template, value: bool(value),
    "requeue": lambda template, value: template not in ("requeue", "chain"),
    "no-requeue": lambda template, value: template not in ("requeue", "chain"),
}


#: Options of sbatch that have a key; "" for those that the scripts set themselves.
_COVERED = {
    "job-name": "job_name",
    "account": "account",
    "partition": "partition",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "nodes": "nodes",
    "gpus-per-node": "gpus_per_node",
    "gres": "gpus_per_node",
    "gpus": "gpus_per_node",
    "gpus-per-task": "gpus_per_node",
    "ntasks": "tasks_per_node",
    "ntasks-per-node": "tasks_per_node",
    "cpus-per-task": "cpus_per_task",
    "mem": "memory",
    "exclusive": "exclusive",
    "time": "time",
    "output": "output",
    "array": "array",
    "mail-user": "mail_user",
    "mail-type": "mail_type",
    "signal": "signal_lead",
    "requeue": "",
    "no-requeue": "",
    "open-mode": "",
    "dependency": "",
    "wrap": "",
    "export": "",
    "parsable": "",
    "test-only": "",
}
