"""What all ranks must agree on before the data of a collective moves."""

from __future__ import annotations

from typing import NamedTuple


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
