"""JobSpec: one checked statement of a job, from which its script is rendered."""

from __future__ import annotations

from collections.abc import Mapping
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
    gpus, tasks, site = spec.gpus, spec["tasks_per_node"], spec.site
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
    lead = spec["signal_lead"]
    if lead is not None and lead >= values.in_seconds(spec["time"]):
        raise OptionError.at(
            _WHERE,
            found=f"signal_lead={lead} and time={spec['time']}",
            expected="a signal_lead in seconds that is less than the time limit",
        )
    if spec["mpiexec"] == "pals" and site.batch != "pbs":
        raise OptionError.at(_WHERE, found="mpiexec=pals", expected="openmpi, mpich or intel: PALS is there under PBS")
