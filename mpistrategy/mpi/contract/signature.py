"""The signature of a call, on which all ranks must agree before data moves, and its digest."""

from __future__ import annotations

from typing import Any, NamedTuple

_CACHED = 4096
_LONG_FIELD = 64


class Signature(NamedTuple):
    """Describes a call; every field is plain data whose repr is the same on all ranks."""

    collective: str
    op: str = ""
    structure: str = ""
    values: tuple[tuple[str, tuple[int, ...]], ...] = ()
    destination: str = ""
    options: str = ""
    name: str = ""
    call: str = ""
    place: str = ""

    def describe(self) -> dict[str, str]:
        """Return the non-empty fields in words."""
        values = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.values)
        words = {**self._asdict(), "values": values}
        return {field: str(value) for field, value in words.items() if value}


class Digests:
    """The digests of signatures, below 2**62; each is computed once."""

    def __init__(self) -> None:
        #: The digest and the signature itself, so that the flight record holds one object for all equal calls.
        self._known: dict[Signature, tuple[int, Signature]] = {}
        self._long_fields: dict[Any, str] = {}

    def of(self, signature: Signature) -> tuple[int, Signature]:
        """Return the digest, and one signature object for all equal ones."""
        found = self._known.get(signature)
        if found is not None:
            return found
        if len(self._known) >= _CACHED:
            self._known.clear()
            self._long_fields.clear()
        # Long fields (the variables of a step) repeat while short ones (its number) change.
        fields = [self._of_field(field) if len(field) > _LONG_FIELD else field for field in signature]
        digest = int.from_bytes(_hashed(repr(fields)), "little") >> 2
        found = self._known[signature] = (digest, signature)
        return found

    def _of_field(self, field: Any) -> str:
        known = self._long_fields.get(field)
        if known is None:
            known = self._long_fields[field] = _hashed(repr(field)).hex()
        return known


def _hashed(text: str) -> bytes:
    import hashlib  # here, since it loads OpenSSL and would slow `import mpistrategy`

    return hashlib.blake2b(text.encode(), digest_size=8).digest()
