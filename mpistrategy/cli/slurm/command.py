"""`mpistrategy slurm`: writes a job script."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys

from mpistrategy import own_files
from mpistrategy.cli.slurm import scripts, sites
from mpistrategy.cli.slurm.keys import KEYS, refuse
from mpistrategy.cli.slurm.scripts import TEMPLATES
from mpistrategy.objects.text import encoded

_OTHERS = shutil.ignore_patterns("*.md", "__pycache__")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpistrategy slurm`."""
    parser.usage = "%(prog)s TEMPLATE [KEY=VALUE ...] [option ...]\n       %(prog)s --list | --all FOLDER [--force]"
    parser.add_argument("template", nargs="?", metavar="TEMPLATE", help=f"one of {', '.join(TEMPLATES)}")
    parser.add_argument(
        "statement", nargs="*", metavar="KEY=VALUE", help="what the job is to be; --list shows the keys"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the script there; default: the screen")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    parser.add_argument("--list", action="store_true", help="show templates, keys and sites")
    parser.add_argument("--all", metavar="FOLDER", help="write all scripts as they stand, and what goes with them")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    try:
        if options.list:
            print(listing())
        elif options.all is not None:
            shutil.copytree(scripts.FOLDER, options.all, dirs_exist_ok=options.force, ignore=_OTHERS)
        elif options.template is not None:
            _render(options)
        else:
            refuse("no template", "a template, or --list, or --all FOLDER")
    except BrokenPipeError:
        raise  # of the screen, not of a file
    except OSError as error:
        refuse(str(error), "files that can be written")
    return 0


def _render(options: argparse.Namespace) -> None:
    statement = {key: value for key, _, value in (word.partition("=") for word in options.statement)}
    site, settings = scripts.checked(options.template, statement)
    name = os.path.basename(options.output or "")
    file = shlex.quote(name) if name and name.isprintable() else "FILE"
    text = scripts.written(options.template, site, settings, file)
    if options.output is None:
        sys.stdout.write(text)
        return
    if not options.force and os.path.lexists(options.output):
        refuse(f"{options.output}, which is there", "a new file", "--force overwrites it.")
    with own_files.whole_file(os.path.realpath(options.output)) as whole:  # behind a link, the file that it names
        whole.write(encoded(text))
        os.fchmod(whole.fileno(), 0o644)


def listing() -> str:
    """Return a list of the templates, keys and sites, to be printed."""
    lines = ["Templates:"]
    lines += [f"  {name:19}{summary}" for name, summary in TEMPLATES.items()]
    lines += ["", "Keys (KEY=VALUE), their defaults in brackets; a template has those that mean something to it:"]
    lines.append(f"  {'site':15}the cluster: a name from below, or the path of a profile that ends in .toml")
    lines += [f"  {name:15}{key.summary}" for name, key in KEYS.items()]
    lines += ["", "Sites:"]
    lines += [f"  {name:15}{sites.load(name).summary}" for name in sites.names()]
    return "\n".join(lines)
