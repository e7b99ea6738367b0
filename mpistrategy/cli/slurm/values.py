"""What the values of a job's statement may look like: each function returns a checked value, or raises OptionError.

Values come from a command line (text) or from a TOML file (text, whole numbers, booleans, lists of texts).  They end up
in comments that a batch system reads, and in a shell script; so nothing passes that could begin a new line.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from mpistrategy.errors import OptionError
from mpistrategy.objects.nearest import did_you_mean

Value = str | int | bool | tuple[str, ...]
#: Takes the given value and the name of the key.
Parse = Callable[[object, str], Value]

_LONGEST_DAYS = 366
_GREATEST_INDEX = 4_000_000
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
# Features and their operators: gpu, gpu&hbm80g, [rack1|rack2], (a|b)&c, gpu*4; no quotes, no blanks.
_FEATURES = re.compile(r"[A-Za-z0-9_([!][A-Za-z0-9_.,:@+*&|()\[\]!=-]*")
_PART_OF_ARRAY = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?")


def _refuse(key: str, found: object, expected: str, fix: str = "") -> NoReturn:
    raise OptionError.at("mpistrategy slurm", found=f"{key}={found!r}", expected=expected, fix=fix)


def one_line(given: object, key: str) -> str:
    """Return a text without line ends, control characters and other characters that cannot be seen."""
    text = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(text, str):
        _refuse(key, given, "a text")
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            _refuse(key, given, "one line of characters that can be seen", f"Take {character!r} out.")
    if not text or text != text.strip():
        _refuse(key, given, "a text that neither is empty nor begins or ends with a blank")
    return text


def word(given: object, key: str) -> str:
    """Return a name such as batch systems have: of accounts, partitions, jobs."""
    text = one_line(given, key)
    if not _WORD.fullmatch(text) or len(text) > 128:
        _refuse(key, given, "a name of letters, digits and _ . @ + -, not beginning with one of the last four")
    return text


def features(given: object, key: str) -> str:
    """Return features of nodes, with the operators that Slurm knows."""
    text = one_line(given, key)
    if not _FEATURES.fullmatch(text) or text.count("(") != text.count(")") or text.count("[") != text.count("]"):
        _refuse(key, given, "features without blanks, such as gpu or gpu&hbm80g")
    return text


def count(least: int, greatest: int) -> Parse:
    """Return a check for whole numbers between two bounds, which are allowed."""

    def parse(given: object, key: str) -> int:
        text = one_line(given, key)
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= greatest:
            _refuse(key, given, f"a whole number from {least} to {greatest}")
        return int(text)

    return parse


def gpus(greatest: int) -> Parse:
    """Return a check for how many GPUs: a whole number, with the type of the GPUs and a colon before it or not."""

    def parse(given: object, key: str) -> Value:
        kind, colon, number = one_line(given, key).rpartition(":")
        if colon and not _WORD.fullmatch(kind):
            _refuse(key, given, "a number, or a type and a number such as a100:4")
        found = count(0, greatest)(number, key)
        return f"{kind}:{found}" if colon else found

    return parse


def address(given: object, key: str) -> str:
    """Return an address for mail."""
    text = one_line(given, key)
    if not re.fullmatch(r"[A-Za-z0-9_.+-]+(@[A-Za-z0-9.-]+)?", text):
        _refuse(key, given, "an address such as you@example.org, or the name of a user")
    return text


def switch(given: object, key: str) -> bool:
    """Return a yes or no."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    answer = given if isinstance(given, bool) else known.get(str(given).lower())
    if answer is None:
        _refuse(key, given, "true or false")
    return answer


def choice(*eligible: str) -> Parse:
    """Return a check for one of some words."""

    def parse(given: object, key: str) -> str:
        text = one_line(given, key)
        if text not in eligible:
            _refuse(key, given, f"one of {', '.join(eligible)}", did_you_mean(text, eligible))
        return text

    return parse


def time(given: object, key: str) -> str:
    """Return a time limit as [D-]HH:MM:SS, which every batch system takes for the same."""
    text = one_line(given, key)
    expected = f"minutes, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; more than 0 and at most {_LONGEST_DAYS} days"
    if re.fullmatch(r"[0-9]+:[0-9][0-9]", text):
        _refuse(key, given, expected, "Slurm takes two numbers for minutes and seconds; write H:MM:SS.")
    if re.fullmatch(r"[0-9]{1,6}", text):
        days, hours, minutes, seconds = 0, 0, int(text), 0
    elif match := re.fullmatch(r"([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])", text):
        days, (hours, minutes, seconds) = 0, map(int, match.groups())
    elif match := re.fullmatch(r"([0-9]{1,3})-([01]?[0-9]|2[0-3])(?::([0-5][0-9]))?(?::([0-5][0-9]))?", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    else:
        _refuse(key, given, expected)
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < whole <= _LONGEST_DAYS * 86400:
        _refuse(key, given, expected)
    return in_words(whole)


def in_words(seconds: int) -> str:
    """Return seconds as [D-]HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def in_seconds(limit: str) -> int:
    """Return the seconds in what `time` has returned."""
    days, _, clock = limit.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def memory(given: object, key: str) -> str:
    """Return an amount of memory; "0" means all memory of a node."""
    text = one_line(given, key)
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}[KMGT]?", text):
        _refuse(key, given, "a whole number with K, M, G or T behind it, such as 64G; or 0 for all that the node has")
    return text


def array(given: object, key: str) -> str:
    """Return the indices of a job array: ``0-9``, ``1,4,7``, ``0-100:10``, and ``%4`` for at most 4 at a time."""
    text = one_line(given, key)
    expected = f"indices up to {_GREATEST_INDEX} such as 0-9, 1,4,7 or 0-99:10, and behind them perhaps %4"
    indices, percent, limit = text.partition("%")
    if percent and not re.fullmatch(r"[1-9][0-9]{0,6}", limit):
        _refuse(key, given, expected)
    for part in indices.split(","):
        match = _PART_OF_ARRAY.fullmatch(part)
        if match is None:
            _refuse(key, given, expected)
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not first <= last <= _GREATEST_INDEX or step < 1:
            _refuse(key, given, expected)
    return text


def path(given: object, key: str) -> str:
    """Return the path of a file, which the script quotes; a leading ~/ is the home folder."""
    text = one_line(given, key)
    if "$" in text or "`" in text or (text.startswith("~") and not text.startswith("~/")):
        _refuse(key, given, "a path as it is", "Nothing is expanded but a leading ~/; write the whole path out.")
    if text.startswith("-"):
        _refuse(key, given, "a path that does not look like an option", "Put ./ in front.")
    return text


def pattern(given: object, key: str) -> str:
    """Return the path of a log file, in which the batch system replaces %j and the like."""
    text = path(given, key)
    if text.startswith("~") or set(text) & set("\"'\\#"):
        _refuse(key, given, "a path without ~, quotes, backslashes and #: the batch system reads it, not a shell")
    return text


def words(given: object, key: str) -> tuple[str, ...]:
    """Return a list of texts; one text is split like a command line."""
    if isinstance(given, (list, tuple)):
        return tuple(one_line(part, key) for part in given)
    text = one_line(given, key)
    try:
        return tuple(one_line(part, key) for part in shlex.split(text))
    except ValueError as error:
        _refuse(key, given, "words as on a command line", f"{error}.")


def modules(given: object, key: str) -> tuple[str, ...]:
    """Return names of environment modules."""
    found = words(given, key)
    for name in found:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*", name):
            _refuse(key, name, "names of modules, such as python/3.11 openmpi")
    return found


def image(given: object, key: str) -> str:
    """Return a container image: a file, or where to get it from (docker://..., nvcr.io#nvidia/...)."""
    return path(given, key)


def mounts(given: object, key: str) -> tuple[str, ...]:
    """Return folders that the container sees, each as FROM:TO."""
    found = words(given, key)
    for mount in found:
        if not re.fullmatch(r"[^:,$`\\]+:[^:,$`\\]+(:ro|:rw)?", path(mount, key)) or not mount.startswith(("/", "~/")):
            _refuse(key, mount, "FROM:TO, or FROM:TO:ro, with whole paths and no commas")
    return found


def extra(given: object, key: str) -> tuple[str, ...]:
    """Return further options for the batch system, as --name or --name=value."""
    found = words(given, key)
    for option in found:
        if not re.fullmatch(r"--[a-z][a-z-]*(=[^\s\"'\\#$`]+)?", option):
            _refuse(key, option, "options such as --nice=10 or --contiguous, without blanks and quotes in their values")
    return found


def shell(text: str) -> str:
    """Return a text as one word of the shell; a leading ~/ stays the home folder."""
    if text.startswith("~/"):
        rest = text[2:]
        return '"$HOME"/' + shlex.quote(rest) if rest else '"$HOME"/'
    return shlex.quote(text)
