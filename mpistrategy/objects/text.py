"""Text from outside as bytes and back: names of files, errors, variables of the environment need not be UTF-8.

Python writes a byte that is not UTF-8 as a lone surrogate.  Here it becomes that byte again: such text travels
between ranks, and into files, as it came.
"""

from __future__ import annotations


def encoded(text: str, most: int | None = None) -> bytes:
    """Return a text as UTF-8, with surrogates as their bytes; it never fails.

    Args:
        text: the text.
        most: how many bytes there may be; a longer text is cut before a character.  None: any number.
    """
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        data = text.encode("utf-8", "surrogatepass")
    if most is None or len(data) <= most:
        return data
    while most and data[most] & 0xC0 == 0x80:  # inside of a character
        most -= 1
    return data[:most]


def decoded(data: bytes | bytearray | memoryview) -> str:
    """Return the text of `encoded`; it never fails."""
    return str(data, "utf-8", "surrogateescape")


def printable(text: str, keep: str = "\n\t") -> str:
    """Return a text for a terminal, with control characters and other unprintable ones as escapes.

    Args:
        text: the text.
        keep: control characters to keep; "" for a text of one line.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )
