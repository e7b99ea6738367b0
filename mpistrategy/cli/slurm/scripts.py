"""Job scripts: the files of the folder slurm/, which run as they are, with other values.

A value replaces a whole directive (``#SBATCH --nodes=2``), the value of an assignment (``program=(...)``), or a
paragraph: the lines that make the environment, and the lines that start the ranks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpistrategy.cli.slurm import sites
from mpistrategy.cli.slurm.keys import KEYS, in_seconds, refuse
from mpistrategy.cli.slurm.sites import Site
from mpistrategy.objects.shown import did_you_mean

_HERE = Path(__file__).resolve().parent
#: The scripts; in a checkout they lie beside the package.
FOLDER = next(folder for folder in (_HERE / "scripts", _HERE.parents[2] / "slurm") if folder.is_dir())
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
#: How directives begin.
_MARK = {"slurm": "#SBATCH", "pbs": "#PBS"}
#: How the ranks are started without srun, in lines of shell; of PBS's nodes, and bound to cores.
_MPIEXEC = {
    "openmpi": """\
# Each rank gets its cores; on nodes that you share, or with more ranks than cores: --bind-to none
launch=(mpirun -n "$ranks" --hostfile "$PBS_NODEFILE")
launch+=(--map-by "ppr:$tasks_per_node:node:PE=$cpus_per_task" --bind-to core)
# Variables reach the other nodes only when named: UCX_TLS, NCCL_DEBUG, ... as further -x options.
launch+=(-x OMP_NUM_THREADS -x PATH)
[[ ! ${LD_LIBRARY_PATH-} ]] || launch+=(-x LD_LIBRARY_PATH)""",
    "mpich": """\
# Each rank gets its cores; on nodes that you share, or with more ranks than cores: -bind-to none
launch=(mpiexec -f "$PBS_NODEFILE" -n "$ranks" -ppn "$tasks_per_node" -bind-to core:"$cpus_per_task")""",
    "intel": """\
# Each rank gets as many cores as OMP_NUM_THREADS says; on nodes that you share: export I_MPI_PIN=0
export I_MPI_PIN_DOMAIN=omp
launch=(mpiexec -f "$PBS_NODEFILE" -n "$ranks" -ppn "$tasks_per_node")""",
    "pals": """\
launch=(mpiexec -n "$ranks" --ppn "$tasks_per_node" --depth="$cpus_per_task" --cpu-bind=depth)""",
}
#: The keys whose values are assigned to variables of the same names, where a script has them.
_ASSIGNED = ("tasks_per_node", "cpus_per_task", "max_restarts", "max_links", "image", "archive", "local")
_MAIL = {"NONE": "n", "BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe"}


class Lines:
    """The lines of a script, and methods that replace lines.

    Args:
        text: of the script.
        mark: how its directives begin.
    """

    def __init__(self, text: str, mark: str) -> None:
        self.lines: list[str] = text.splitlines()
        self._mark = mark

    def find(self, start: str) -> int:
        """Return the number of the first line that begins so; -1 for none."""
        return next((at for at, line in enumerate(self.lines) if line.startswith(start)), -1)

    def directive(self, start: str, text: str | None) -> None:
        """Replace the directive that begins so, on or off, else add it after the last; None removes it."""
        at = max(self.find(f"{mark}{self._mark} {start}") for mark in ("", "#"))
        if at >= 0:
            self.lines[at : at + 1] = [] if text is None else [f"{self._mark} {text}"]
        elif text is not None:
            self.add(text)

    def add(self, *texts: str) -> None:
        """Write directives after the last one."""
        last = max(number for number, line in enumerate(self.lines) if line.lstrip("#").startswith(self._mark[1:]))
        self.lines[last + 1 : last + 1] = [f"{self._mark} {text}" for text in texts]

    def assigns(self, name: str) -> bool:
        """Return whether there is a line ``name=``."""
        return self.find(f"{name}=") >= 0

    def assign(self, name: str, value: str) -> None:
        """Write another value behind ``name=``; a comment behind it stays."""
        at = self.find(f"{name}=")
        comment = re.search(r" +# .*", self.lines[at])
        self.lines[at] = f"{name}={value}{comment[0] if comment else ''}"

    def launch(self, lines: Sequence[str]) -> None:
        """Replace the paragraph that starts the ranks, as far as its last ``launch``, by other lines."""
        first = last = self.find("launch=(")
        while self.lines[first - 1]:
            first -= 1
        while "launch" in self.lines[last + 1] or self.lines[last + 1].startswith("# Variables"):
            last += 1
        self.lines[first : last + 1] = lines


def keys_of(template: str, site: Site) -> list[str]:
    """Return the keys that a template uses at a site."""
    lines = _script(template, site)
    text = "\n".join(lines.lines)
    has = {
        "nodes": template != "single_node",
        "array": template == "array",
        "signal_lead": template in ("requeue", "chain"),
        "gpu_option": site.batch == "slurm" and site.gpus > 0,
        "mpi": any(line.startswith("launch=(srun") for line in site.launch or lines.lines),
        "mpiexec": "launch=(mpirun" in text,
        "mounts": "image=" in text,
        "venv": "bin/activate" in text,
        "arguments": True,
        "modules": True,
    }
    for name, key in KEYS.items():
        directive = key.slurm if site.batch == "slurm" else key.pbs
        has.setdefault(name, bool(directive) or lines.assigns(name))
    return [name for name in KEYS if has[name]]


def _script(template: str, site: Site) -> Lines:
    name = f"{template}.sbatch" if site.batch == "slurm" else f"pbs/{template}.pbs"
    return Lines((FOLDER / name).read_text(encoding="utf-8"), _MARK[site.batch])


def checked(template: str, statement: Mapping[str, object]) -> tuple[Site, dict[str, str]]:
    """Return the site of a statement, and the texts of the values by key, with the values of the site.

    Raises:
        OptionError: for keys that the template does not have, values that are not allowed, and values that do not fit
            together.
    """
    if template not in TEMPLATES:
        near = did_you_mean(template, TEMPLATES)
        refuse(f"the template {template!r}", f"one of {', '.join(TEMPLATES)}", near)
    site = sites.load(statement["site"]) if "site" in statement else Site()
    if site.templates and template not in site.templates:
        refuse(f"the template {template!r} for the site {site.name}", f"one of {', '.join(site.templates)}")
    eligible = keys_of(template, site)
    for key in statement:
        if key in site.skip and key != "cpus_per_task":  # which says how many threads a rank has, too
            refuse(f"{key}=", f"no such key: {site.name} refuses jobs that have it")
        if key not in (*eligible, "site"):
            hint = "Others have it: another template, launcher or batch system."
            fix = hint if key in KEYS else did_you_mean(key, ["site", *eligible])
            expected = f"keys of the template {template}: {', '.join(['site', *eligible])}"
            refuse(f"the key {key!r}", expected, fix)
    settings = {key: KEYS[key].parse(value, key) for key, value in statement.items() if key != "site"}
    defaults = {key: KEYS[key].parse(value, key) for key, value in site.defaults.items() if key in eligible}
    merged = defaults | settings
    gpus = _gpus(merged)
    if gpus and "tasks_per_node" not in settings:
        merged["tasks_per_node"] = str(gpus)
    if gpus > site.gpus:
        fix = "" if site.gpus else "Its GPUs are none that this library can use: leave gpus_per_node out."
        where = site.name or "a node"
        refuse(f"gpus_per_node={merged['gpus_per_node']}", f"at most {site.gpus} on {where}", fix)
    if gpus and int(merged["tasks_per_node"]) != gpus:
        conflict = f"tasks_per_node={merged['tasks_per_node']} and gpus_per_node={gpus}"
        refuse(conflict, "as many ranks as GPUs: a rank drives one", "Leave tasks_per_node out.")
    limit, lead = merged.get("time", "00:10:00"), merged.get("signal_lead", "120")
    if "signal_lead" in eligible and int(lead) >= in_seconds(limit):
        conflict = f"signal_lead={lead} and time={limit}"
        refuse(conflict, "a signal_lead in seconds that is less than the time limit")
    return site, merged


def written(template: str, site: Site, settings: Mapping[str, str], file: str = "") -> str:
    """Return the text of a script with values that `checked` has returned; it speaks of itself as `file`."""
    lines = _script(template, site)
    _write_header(lines, template, site, file)
    if site.batch == "slurm":
        _write_slurm(lines, site, settings)
    else:
        _write_pbs(lines, template, site, settings)
    _write_launch(lines, site, settings)
    _write_environment(lines, site, settings)
    for key in _ASSIGNED:
        if key in settings and lines.assigns(key):
            lines.assign(key, settings[key])
    if "program" in settings or "arguments" in settings:
        words = [settings.get("program", "example.py"), settings.get("arguments", "")]
        lines.assign("program", f"({' '.join(filter(None, words))})")
    _write_container(lines, template, settings)
    return "\n".join(lines.lines) + "\n"


def _gpus(settings: Mapping[str, str]) -> int:
    return int(settings.get("gpus_per_node", "0").rpartition(":")[2])


def _write_header(lines: Lines, template: str, site: Site, file: str) -> None:
    own = f"{template}.{'sbatch' if site.batch == 'slurm' else 'pbs'}"
    if file:
        lines.lines[:] = [line.replace(own, file) if line.startswith("#") else line for line in lines.lines]
    if site.name:
        notes = ["#", f"# Site {site.name}: {site.summary}", *(f"# {line}" for line in site.notes)]
        if site.pages:
            notes.append(f"# Not tried on the machine itself; held on {site.checked} against copies of these pages:")
            notes += [f"#   {page.split()[0]}" for page in site.pages]
        at = lines.lines.index("")
        lines.lines[at:at] = notes


def _quoted(text: str) -> str:
    """Return a value as sbatch reads it; no value has quotes or backslashes in it."""
    return f'"{text}"' if set(text) & set(" ;()[]|&*!,#") else text


def _write_slurm(lines: Lines, site: Site, settings: Mapping[str, str]) -> None:
    lines.add(*site.directives, *settings.get("extra", "").split())
    for name, key in KEYS.items():
        if name in ("extra", "gpus_per_node") or not key.slurm:
            continue
        start, value = key.slurm.partition("{")[0], settings.get(name)
        if name in site.skip:
            lines.directive(start, None)
        elif value is not None and (name, value) != ("exclusive", "false"):
            lines.directive(start, key.slurm.format(_quoted(value)))
    option = "--gres=gpu:{}" if settings.get("gpu_option") == "gres" else KEYS["gpus_per_node"].slurm
    at = lines.find("# With GPUs: as many ranks on a node")
    if "gpu_option" in site.skip or not site.gpus:
        del lines.lines[at : at + 2]
    elif _gpus(settings):
        lines.lines[at : at + 2] = [
            "# One rank for each GPU: the same number as above. Every rank sees all GPUs of its node.",
            f"#SBATCH {option.format(settings['gpus_per_node'])}",
        ]
    cpus, per_core = settings.get("cpus_per_task", "1"), site.threads_per_core
    threads = f"${{SLURM_CPUS_PER_TASK:-{cpus}}}"
    if per_core > 1:
        threads = f"$(((SLURM_CPUS_PER_TASK + {per_core - 1}) / {per_core}))"
    lines.assign("export OMP_NUM_THREADS", threads)


def _write_pbs(lines: Lines, template: str, site: Site, settings: Mapping[str, str]) -> None:
    nodes = settings.get("nodes", "1" if template in ("single_node", "array") else "2")
    tasks, cpus = settings.get("tasks_per_node", "2"), settings.get("cpus_per_task", "1")
    chunk = [f"select={nodes}"]
    if "cpus_per_task" not in site.skip:  # where it is left out, jobs get whole nodes
        chunk += [f"ncpus={int(tasks) * int(cpus)}", f"mpiprocs={tasks}"]
        chunk += [f"ngpus={_gpus(settings)}"] if _gpus(settings) else []
    if memory := settings.get("memory"):
        chunk.append(f"mem={memory}b".lower() if memory[-1].isalpha() else f"mem={memory}mb")
    chunk += filter(None, [settings.get("constraint")])
    lines.directive("-l select=", f"-l {':'.join(chunk)}")
    if settings.get("exclusive") == "true":
        lines.directive("-l place=", "-l place=scatter:excl")
    for name in ("job_name", "time", "partition", "account", "output", "array", "mail_user", "mail_type"):
        if name in settings:
            pbs_directive = KEYS[name].pbs
            value = _MAIL[settings[name]] if name == "mail_type" else settings[name]
            lines.directive(pbs_directive.partition("{")[0], pbs_directive.format(value))
    again = template in ("requeue", "chain")
    lines.add(*(directive for directive in site.directives if not (again and directive.startswith("-r "))))
    if lines.assigns("tell_after"):
        seconds = in_seconds(settings.get("time", "00:10:00")) - int(settings.get("signal_lead", "120"))
        lines.assign("tell_after", str(seconds))
        lines.assign("hands_on", "TERM" if settings.get("mpiexec") in ("mpich", "intel") else "USR2")


def _write_launch(lines: Lines, site: Site, settings: Mapping[str, str]) -> None:
    if site.launch and lines.find("launch=(srun") >= 0:
        lines.launch(site.launch)
    if "mpi" in settings:
        at = lines.find("launch=(srun")
        lines.lines[at] = f"{lines.lines[at][:-1]} --mpi={shlex.quote(settings['mpi'])})"
        if lines.lines[at - 1].startswith("# If every rank"):  # a hint for ranks that say that they are alone
            del lines.lines[at - 1]
    elif "mpiexec" in settings:
        text = _MPIEXEC[settings["mpiexec"]]
        if site.batch == "slurm":  # mpiexec asks Slurm for the nodes
            text = re.sub(r' (-f|--hostfile) "\$PBS_NODEFILE"', "", text)
        lines.launch(text.splitlines())


def _write_environment(lines: Lines, site: Site, settings: Mapping[str, str]) -> None:
    at = lines.find("# source ")
    if "venv" in settings:
        lines.lines[at] = f"# shellcheck disable=SC1090,SC1091\nsource {settings['venv']}/bin/activate"
    at = lines.find("# module load")
    if "modules" in settings:
        lines.lines[at] = f"module load {settings['modules']}"
    lines.lines[at + 1 : at + 1] = site.setup


def _write_container(lines: Lines, template: str, settings: Mapping[str, str]) -> None:
    if template == "pyxis":
        if "mounts" in settings:
            lines.assign("options", f"(--container-mounts={settings['mounts']})")
        image = settings.get("image", "")
        if image.strip("'").endswith(".sqsh") and "/" not in image:
            lines.assign("image", f"./{image}")  # else pyxis takes it for a name in a registry
    elif template == "apptainer" and ("mounts" in settings or _gpus(settings)):
        words = ["--nv" if _gpus(settings) else "", f"--bind {settings['mounts']}" if "mounts" in settings else ""]
        lines.assign("options", f"({' '.join(filter(None, words))})")
