"""Sites: the differences between clusters, one TOML file for each; beside this file, or the user's own."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpistrategy import own_files
from mpistrategy.cli.slurm import values
from mpistrategy.cli.slurm.keys import KEYS, TEMPLATES
from mpistrategy.errors import OptionError
from mpistrategy.objects.nearest import did_you_mean

FOLDER = Path(__file__).parent / "sites"
#: Far larger than any profile; tomllib takes quadratic time for keys of many parts.
_MOST_BYTES = 2**14


@dataclass(frozen=True)
class Site:
    """A cluster, as far as its job scripts differ from those of others.

    Attributes:
        name: as in ``site=NAME``.
        summary: what it is, in one line.
        notes: lines of comment for the top of its scripts.
        checked: the day on which the profile was held against `pages`; "" for never.
        pages: pages of the centre, each as ``ADDRESS "A SENTENCE OF IT"``: what values of the profile rest on.
        unchecked: what no page was found for, in words.
        batch: "slurm" or "pbs".
        launcher: "srun", "ibrun" (TACC) or "mpiexec" (PBS; the key `mpiexec` says whose).
        launcher_options: for the launcher.
        gpu_option: how to request GPUs: "gpus-per-node", "gres", or "" where the partition says it all.
        gpus: how many GPUs a node has that this library can use.
        threads_per_core: how many CPUs, as the batch system counts them, are one core.
        cray: whether its MPI is Cray MPICH, of which its scripts then speak.
        module_use: folders of modules that are not searched without being named.
        templates: those that work there; empty for all.
        requires: keys without which no job is accepted there.
        defaults: values of keys that are not given.
        skip: directives to leave out, by the names of their keys.
        directives: further directives, without ``#SBATCH`` or ``#PBS``.
        setup: lines of shell for the environment.
    """

    name: str = ""
    summary: str = ""
    notes: tuple[str, ...] = ()
    checked: str = ""
    pages: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    batch: str = "slurm"
    launcher: str = "srun"
    launcher_options: tuple[str, ...] = ("--cpu-bind=cores",)
    gpu_option: str = "gpus-per-node"
    gpus: int = 64
    threads_per_core: int = 1
    cray: bool = False
    module_use: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    defaults: Mapping[str, values.Value] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


GENERIC = Site()
_ALLOWED = {
    "batch": ("slurm", "pbs"),
    "launcher": ("srun", "ibrun", "mpiexec"),
    "gpu_option": ("gpus-per-node", "gres", ""),
    "templates": tuple(TEMPLATES),
    "requires": tuple(KEYS),
    "skip": tuple(KEYS),
}


def names() -> list[str]:
    """Return the names of the sites that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Site:
    """Return a site.

    Args:
        name: of a site that comes with the package, or the path of a file that ends in .toml.

    Raises:
        OptionError: when there is none, or the file is not as it must be.
    """
    text = values.one_line(name, "site")
    is_file = text.endswith(".toml")
    if not is_file and text not in names():
        raise OptionError.at(
            "mpistrategy slurm",
            found=f"site={name!r}",
            expected=f"one of {', '.join(names())}, or the path of a profile that ends in .toml",
            fix=did_you_mean(text, names()),
        )
    path = Path(os.path.expanduser(text)) if is_file else FOLDER / f"{text}.toml"
    try:
        table = read_toml(path)
    except (OSError, ValueError) as error:
        raise _refusal(path, str(error), "a file in TOML that can be read") from None
    return _site(table, path)


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is in a file of TOML: a site's profile, or what a job is to be.

    Raises:
        OSError: when it cannot be read, is not a regular file or is too large; where everybody can write, for somebody
            else's.
        ValueError: when it is not TOML, or nested too deeply.
    """
    text = own_files.read(os.path.realpath(path), _MOST_BYTES).decode()
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _site(table: dict[str, Any], path: Path) -> Site:
    known = {each.name: each for each in fields(Site) if each.name != "name"}
    unknown = [key for key in table if key not in known]
    if unknown:
        raise _refusal(path, f"the unknown key {unknown[0]!r}", f"keys out of {', '.join(known)}")
    for key, given in table.items():
        default = getattr(GENERIC, key)
        kind = dict if key == "defaults" else list if isinstance(default, tuple) else type(default)
        if type(given) is not kind:
            raise _refusal(path, f"{key}={given!r}", f"a {kind.__name__}")
        parts = given if isinstance(given, list) else [given] if isinstance(given, str) else []
        for part in parts:
            if part != "":
                values.one_line(part, f"{key} of {path}")
        wrong = [part for part in parts if key in _ALLOWED and part not in _ALLOWED[key]]
        if wrong:
            raise _refusal(path, f"{key}={wrong[0]!r}", f"out of {', '.join(filter(None, _ALLOWED[key]))}")
    for key in table.get("defaults", {}):
        if key not in KEYS:
            raise _refusal(path, f"the default of an unknown key {key!r}", f"keys out of {', '.join(KEYS)}")
    whole: dict[str, Any] = {key: tuple(given) if isinstance(given, list) else given for key, given in table.items()}
    whole["defaults"] = {key: KEYS[key].parse(given, key) for key, given in table.get("defaults", {}).items()}
    return Site(name=path.stem, **whole)


def _refusal(path: Path, found: str, expected: str) -> OptionError:
    return OptionError.at(f"mpistrategy slurm, the profile {path}", found=found, expected=expected)
