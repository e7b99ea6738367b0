"""Hides secrets: values of variables whose names look secret, and texts that look like a secret.

The report shows only variables that a check names; this is a second safeguard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR)|COOKIE|JWT|API_?KEY|(^|_)(KEY|PAT|PWD)$|(PRIVATE|ACCESS)_?KEY",
    re.I,
)
#: Working folders, which have such names as well.
_NO_SECRETS = {"PWD", "OLDPWD", "SSH_AUTH_SOCK"}
_SHORTEST = 6
_WORD = r"[\w-]*(?:secret|token|passw(?:or)?d|passphrase|credential|api_?key)[\w-]*"
_PATTERNS = (
    re.compile(rf"({_WORD}\s*[=:]\s*)[^\s,;'\"/]+", re.I),  # token=abc
    re.compile(r"(://)[^/\s:@]+:[^/\s@]+(?=@)"),  # https://user:password@host
    # a folder named after one: /home/me/token-4f1c/...; file names of programs are left alone
    re.compile(r"()(?<![\w.-])[\w.-]*(?:secret|token|passw(?:or)?d)[-_.](?=[\w-]*\d)(?![\w.-]*\.py)[\w-]{4,}", re.I),
    re.compile(r"()\b(?:gh[pousr]_\w{16,}|hf_\w{16,}|sk-[\w-]{16,}|AKIA\w{12,}|eyJ[\w-]{16,}(?:\.[\w-]+)*)"),
)


def veil(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that removes secrets from a text.

    Args:
        environment: whose values may be among them.
    """
    values = {
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and name not in _NO_SECRETS and len(value) >= _SHORTEST
    }
    longest_first = sorted(values, key=len, reverse=True)

    def cover(text: str) -> str:
        for value in longest_first:
            text = text.replace(value, HIDDEN)
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\1{HIDDEN}", text)
        return text

    return cover


def covered(told: Any, cover: Callable[[str], str]) -> Any:
    """Return a nest of plain values with every text in it covered."""
    if isinstance(told, str):
        return cover(told)
    if isinstance(told, dict):
        return {key: covered(value, cover) for key, value in told.items()}
    if isinstance(told, (list, tuple)):
        return [covered(value, cover) for value in told]
    return told
