"""What the values of a job's statement may look like: each function returns a checked value, or raises OptionError.

Values come from a command line (text) or from a TOML file (text, whole numbers, booleans, lists of texts).  They end up
in comments that a batch system reads, and in a shell script: so nothing passes that could begin a new line, and what a
shell reads is quoted.  Whether a cluster has such a partition, feature, time limit or array: `sbatch --test-only` says.
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
    """Return a word for the batch system, which splits its lines at blanks and takes quotes apart."""
    text = one_line(given, key)
    if re.search(r"[\s\"'\\\\#$`]", text) or text.startswith("-"):
        _refuse(key, given, "a word without blanks, quotes, backslashes, #, $ and `, not beginning with -")
    return text


def count(least: int) -> Parse:
    """Return a check for whole numbers from a bound on."""

    def parse(given: object, key: str) -> int:
        text = one_line(given, key)
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            _refuse(key, given, f"a whole number from {least} on")
        return int(text)

    return parse


def gpus(given: object, key: str) -> Value:
    """Return how many GPUs: a whole number, with the type of the GPUs and a colon before it or not."""
    kind, colon, number = word(given, key).rpartition(":")
    if colon and not kind:
        _refuse(key, given, "a number, or a type and a number such as a100:4")
    found = count(0)(number, key)
    return f"{kind}:{found}" if colon else found


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
    expected = "minutes, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; more than 0"
    if re.fullmatch(r"[0-9]+:[0-9][0-9]", text):
        _refuse(key, given, expected, "Slurm takes two numbers for minutes and seconds; write H:MM:SS.")
    match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,6})(?::(\d\d))?(?::(\d\d))?", text, re.ASCII)
    if match is None:
        _refuse(key, given, expected)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if text.isdigit():
        hours, minutes = 0, hours
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not whole:
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


def path(given: object, key: str) -> str:
    """Return the path of a file, which the script quotes; a leading ~/ is the home folder."""
    text = one_line(given, key)
    if "$" in text or "`" in text or (text.startswith("~") and not text.startswith("~/")):
        _refuse(key, given, "a path as it is", "Nothing is expanded but a leading ~/; write the whole path out.")
    if text.startswith("-"):
        _refuse(key, given, "a path that does not look like an option", "Put ./ in front.")
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


def paths(given: object, key: str) -> tuple[str, ...]:
    """Return a list of paths."""
    return tuple(path(part, key) for part in words(given, key))


def options(given: object, key: str) -> tuple[str, ...]:
    """Return further options for the batch system, as --name or --name=value."""
    found = words(given, key)
    for option in found:
        if not option.startswith("--"):
            _refuse(key, option, "options such as --nice=10 or --contiguous")
        word(option[2:], key)
    return found


def shell(text: str) -> str:
    """Return a text as one word of the shell; a leading ~/ stays the home folder."""
    if text.startswith("~/"):
        rest = text[2:]
        return '"$HOME"/' + shlex.quote(rest) if rest else '"$HOME"/'
    return shlex.quote(text)
