"""Sites: the differences between clusters, one TOML file for each; beside this file, or the user's own."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpistrategy.cli.slurm.keys import KEYS, one_line, refuse
from mpistrategy.errors import OptionError
from mpistrategy.objects.shown import did_you_mean

FOLDER = Path(__file__).parent / "sites"


@dataclass(frozen=True)
class Site:
    """A cluster, as far as its job scripts differ from other clusters'.

    Attributes:
        name: as in ``site=NAME``.
        summary: the cluster, in one line.
        notes: lines of comment for the top of its scripts: also keys that it wants, and facts that no page confirms.
        checked: the day on which the profile was held against `pages`; "" for never.
        pages: pages of the centre, each as ``ADDRESS "A SENTENCE OF IT"``: what values of the profile rest on.
        batch: "slurm" or "pbs".
        launch: lines of shell that start the ranks; empty for the lines of the script.
        gpus: how many GPUs a node has that this library can use; "0" for none.
        threads_per_core: how many CPUs, as the batch system counts them, are one core.
        templates: the templates that work there; empty for all.
        defaults: values of keys that the statement does not have.
        skip: keys whose directives the site refuses.
        directives: further directives, without ``#SBATCH`` or ``#PBS``.
        setup: lines of shell for the environment.
    """

    name: str = ""
    summary: str = ""
    notes: tuple[str, ...] = ()
    checked: str = ""
    pages: tuple[str, ...] = ()
    batch: str = "slurm"
    launch: tuple[str, ...] = ()
    gpus: int = 64
    threads_per_core: int = 1
    templates: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


def names() -> list[str]:
    """Return the names of the sites that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: object) -> Site:
    """Return a site.

    Args:
        name: of a site that comes with the package, or the path of a file that ends in .toml.

    Raises:
        OptionError: when there is none, or the file is not as it must be.
    """
    text, where = one_line(name, "site"), f"mpistrategy slurm, the profile {name}"
    path = Path(os.path.expanduser(text)) if text.endswith(".toml") else FOLDER / f"{text}.toml"
    if not text.endswith(".toml") and text not in names():
        expected = f"one of {', '.join(names())}, or the path of a profile that ends in .toml"
        refuse(f"site={name!r}", expected, did_you_mean(text, names()))
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError.at(where, found=str(error), expected="a file in TOML that can be read") from None
    whole: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    kinds = {key: type(value) for key, value in vars(Site()).items() if key != "name"}
    for key, value in whole.items():
        if kinds.get(key) is not type(value):
            expected = ", ".join(
                f"{name} ({'list' if kind is tuple else kind.__name__})" for name, kind in kinds.items()
            )
            raise OptionError.at(where, found=f"the key {key!r}", expected=f"keys out of {expected}")
    site = Site(name=path.stem, **whole)
    if site.batch not in ("slurm", "pbs"):
        raise OptionError.at(where, found=f"batch={site.batch!r}", expected="slurm or pbs")
    for key in (*site.defaults, *site.skip):
        if key not in KEYS:
            raise OptionError.at(where, found=f"an unknown key {key!r}", expected=f"keys out of {', '.join(KEYS)}")
    return site
