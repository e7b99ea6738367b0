"""What all ranks must agree on before the data of a collective moves, and the number that stands for it."""

from __future__ import annotations

from typing import Any, NamedTuple

_CACHED = 4096
_LONG_FIELD = 64


class Signature(NamedTuple):
    """What all ranks must agree on before data moves; every field is plain data that prints the same everywhere."""

    verb: str
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
    """The digests of signatures, below 2**62; those of the calls of a program are worked out once."""

    def __init__(self) -> None:
        #: With each digest its signature, so that the flight record holds one object for all equal calls.
        self._known: dict[Signature, tuple[int, Signature]] = {}
        self._long_fields: dict[Any, str] = {}

    def of(self, signature: Signature) -> tuple[int, Signature]:
        """Return the digest, and the one signature that is kept for all equal ones."""
        found = self._known.get(signature)
        if found is not None:
            return found
        if len(self._known) >= _CACHED:
            self._known.clear()
            self._long_fields.clear()
        # What is long (the variables of a step, say) stays the same while what is short (its number) changes.
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
    import hashlib  # here, since it loads OpenSSL: `import mpistrategy` stays quick

    return hashlib.blake2b(text.encode(), digest_size=8).digest()
