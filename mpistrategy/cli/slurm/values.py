"""What the values of a job's statement may look like: each function returns the text for the script, or raises.

Values come from a command line (text) or from a site's profile (text, whole numbers, booleans, lists of texts).  They
end up in comments that a batch system reads, and in a shell script: so no value may begin a new line, and values for
a shell are quoted.  Whether a cluster has such a partition, feature, time limit or array: `sbatch --test-only` says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import NoReturn

from mpistrategy.errors import OptionError
from mpistrategy.objects.shown import did_you_mean

#: Takes the given value and the name of the key.
Parse = Callable[[object, str], str]


def _refuse(key: str, value: object, expected: str, fix: str = "") -> NoReturn:
    raise OptionError.at("mpistrategy slurm", found=f"{key}={value!r}", expected=expected, fix=fix)


def one_line(value: object, key: str) -> str:
    """Return a text without line ends, control characters and other characters that cannot be seen."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        _refuse(key, value, "a text")
    text = str(value)
    hidden = next((character for character in text if not character.isprintable()), "")
    if hidden or not text or text != text.strip():
        fix = f"Take {hidden!r} out." if hidden else ""
        _refuse(key, value, "one line of characters that can be seen, without blanks around it", fix)
    return text


def matching(pattern: str, expected: str) -> Parse:
    """Return a check for texts that match a pattern as a whole."""

    def parse(value: object, key: str) -> str:
        text = one_line(value, key)
        if not re.fullmatch(pattern, text, re.ASCII):
            _refuse(key, value, expected)
        return text

    return parse


#: A word for the batch system, which splits its lines at blanks and takes quotes apart.
word: Parse = matching(
    r"(?!-)[^\s\"'\\#$`]+", "a word without blanks, quotes, backslashes, #, $ and `, not beginning with -"
)
number: Parse = matching(r"[0-9]{1,9}", "a whole number")
positive_number: Parse = matching(r"0*[1-9][0-9]{0,8}", "a whole number from 1 on")
gpus: Parse = matching(
    r"(?:[^\s:\"'\\#$`-][^\s:\"'\\#$`]*:)?[0-9]{1,9}", "a number, or a type and a number such as a100:4"
)


def choice(*eligible: str) -> Parse:
    """Return a check for one of some words; of "true" and "false", a boolean is one, too."""

    def parse(value: object, key: str) -> str:
        text = str(value).lower() if isinstance(value, bool) else one_line(value, key)
        if text not in eligible:
            _refuse(key, value, f"one of {', '.join(eligible)}", did_you_mean(text, eligible))
        return text

    return parse


def time(value: object, key: str) -> str:
    """Return a time limit as HH:MM:SS, which every batch system takes for the same."""
    text = one_line(value, key)
    match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,6})(?::(\d\d))?(?::(\d\d))?", text, re.ASCII)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    if text.isdigit():
        hours, minutes = divmod(hours, 60)
    whole = ((24 * days + hours) * 60 + minutes) * 60 + seconds
    two_numbers = re.fullmatch(r"[0-9]+:[0-9][0-9]", text)
    if two_numbers or not whole:
        fix = "Slurm takes two numbers for minutes and seconds; write H:MM:SS." if two_numbers else ""
        _refuse(key, value, "minutes, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; more than 0", fix)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"


def in_seconds(limit: str) -> int:
    """Return the seconds of a limit that `time` has returned."""
    hours, minutes, seconds = map(int, limit.split(":"))
    return hours * 3600 + minutes * 60 + seconds


def path(value: object, key: str) -> str:
    """Return the path of a file as a word of the shell; a leading ~/ is the home folder."""
    text = one_line(value, key)
    if re.search(r"[$`]|^-|^~(?!/)", text):
        fix = "Nothing is expanded but a leading ~/; write the whole path out. Put ./ before a -."
        _refuse(key, value, "a path as it is", fix)
    if text.startswith("~/"):
        return '"$HOME"/' + (shlex.quote(text[2:]) if text[2:] else "")
    return shlex.quote(text)


def parts(value: object, key: str) -> list[str]:
    """Return a list of texts; one text is split like a command line."""
    try:
        split = value if isinstance(value, list) else shlex.split(one_line(value, key))
    except ValueError as error:
        _refuse(key, value, "words as on a command line", f"{error}.")
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
