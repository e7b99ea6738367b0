"""Decides whether this MPI takes pointers to GPU memory: from evidence, by the weakest answer of all ranks.

A wrong yes is a segmentation fault, a wrong no costs a copy: in doubt the answer is "unverified", and everything is
staged through the host, as after a no.  The ladder: the word of the user; what the library's own functions say,
together with the switch that some libraries have besides; the memory kinds of MPI 4.1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrategy.errors import OptionError, OptionTypeError
from mpistrategy.mpi.tuning.files import library_name
from mpistrategy.objects.shown import ranks_in_words
from mpistrategy.options import NO_WORDS, YES_OR_NO, YES_WORDS, is_on

#: The user's decision: 1 or 0.
VARIABLE = "MPISTRATEGY_CUDA_AWARE"
NO, UNVERIFIED, YES = VERDICTS = ("no", "unverified", "yes")  # the weakest first


@dataclass(frozen=True)
class Evidence:
    """What is known of the MPI library of a process.

    Attributes:
        version: what it says about itself; several lines, of some.
        standard: the version of the MPI standard that it claims.
        queried: what MPIX_GPU_query_support or MPIX_Query_cuda_support says; None where it has neither.
        switched_on: the state of Open MPI's own switch in memory; None where there is none.
        memory_kinds: `mpi_memory_alloc_kinds` of all ranks' communicator; "" if absent.
        mapped: the names of the files of libraries that the process has loaded.
        environment: the variables of the process.
    """

    version: str
    standard: tuple[int, int] = (3, 1)
    queried: bool | None = None
    switched_on: bool | None = None
    memory_kinds: str = ""
    mapped: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Whether an MPI takes pointers to GPU memory.

    Attributes:
        verdict: "yes", "no" or "unverified".
        reason: in words.
    """

    verdict: str
    reason: str

    @property
    def is_yes(self) -> bool:
        """Whether GPU memory may be given to MPI."""
        return self.verdict == YES

    def text(self) -> str:
        """Return it as a text for the other ranks."""
        return f"{self.verdict} {self.reason}"

    @classmethod
    def read(cls, text: str) -> Answer:
        """Return what `text` was made of."""
        verdict, _, reason = text.partition(" ")
        return cls(verdict, reason)


@dataclass(frozen=True)
class _Switch:
    """What turns on the GPU support of a library that is off by default, whatever the library's functions say.

    Attributes:
        version: a pattern in what the library says about itself.
        settings: the variables and the values that they must have; patterns.
        mapped: a library that must be loaded besides; "" if none is known.
    """

    version: str
    settings: tuple[tuple[str, str], ...]
    mapped: str = ""

    def is_on(self, environment: Mapping[str, str]) -> bool:
        return all(re.fullmatch(value, environment.get(name, "").lower()) for name, value in self.settings)

    def __str__(self) -> str:
        return " and ".join(f"{name}={value.partition('|')[0]}" for name, value in self.settings)


_ON = "1|yes|true|on"
_SWITCHES = (
    _Switch("cray mpich version", (("MPICH_GPU_SUPPORT_ENABLED", _ON),), "libmpi_gtl_cuda"),
    _Switch("^mvapich2", (("MV2_USE_CUDA", _ON),)),  # its function only tells how it was built
    _Switch("^mvapich", (("MVP_USE_CUDA", _ON),)),
    _Switch(r"^intel\(r\) mpi", (("I_MPI_OFFLOAD", "1|2"), ("I_MPI_OFFLOAD_MODE", "cuda"))),
    _Switch("spectrum mpi", (("OMPI_MCA_pml_pami_enable_cuda", _ON),)),  # which -gpu sets
)


def said(given: Any = None, environment: Mapping[str, str] | None = None) -> bool | None:
    """Return the user's word: an argument, else the variable MPISTRATEGY_CUDA_AWARE; None where there is none.

    Raises:
        OptionError: for a variable that says neither yes nor no.
        OptionTypeError: for an argument that is no bool.
    """
    if given is not None:
        if not isinstance(given, bool):
            raise OptionTypeError.at("cuda_aware", found=repr(given), expected="True, False, or None to find out")
        return given
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if text.lower() not in ("", *NO_WORDS, *YES_WORDS):
        raise OptionError.at(VARIABLE, found=repr(text), expected=YES_OR_NO)
    return is_on(text) if text else None


def decide(evidence: Evidence, word: bool | None = None) -> Answer:
    """Return whether an MPI takes pointers to GPU memory.

    Args:
        evidence: about its library.
        word: of the user, who has the last one.
    """
    if word is not None:
        return Answer(YES if word else NO, "the user says so")
    name, queried = library_name(evidence.version), evidence.queried
    says = f"{name} says that it was built with CUDA" if queried else f"{name} says that it has no CUDA"
    switch = next((each for each in _SWITCHES if re.search(each.version, evidence.version.lower())), None)
    if switch is not None:
        return _with_switch(evidence, switch, name, says)
    if queried and name.startswith("Open MPI"):
        # conda-forge's is built with CUDA and switched off; the function of versions before 5 tells how it was built.
        if evidence.switched_on is False:
            return Answer(NO, f"{says}; it is switched off (opal_cuda_support), or found no driver")
        if evidence.switched_on is None and re.match(r"Open MPI v?[1-4]\.", name):
            return Answer(UNVERIFIED, f"{says}; whether it is switched on (opal_cuda_support) cannot be seen")
    kinds = _has_cuda(evidence)
    if queried is False and kinds:
        return Answer(UNVERIFIED, f"{says}, and that it has memory of the kind cuda")
    if queried is not None:
        return Answer(YES if queried else NO, says)
    if kinds:
        return Answer(YES, f"{name} has memory of the kind cuda")
    return Answer(UNVERIFIED, f"nothing in {name} tells")


def _with_switch(evidence: Evidence, switch: _Switch, name: str, says: str) -> Answer:
    queried = evidence.queried
    if not switch.is_on(evidence.environment):
        if queried:
            return Answer(UNVERIFIED, f"{says}, but {switch} is not set")
        return Answer(NO, f"{name} takes GPU memory with {switch} only")
    if queried is False:
        return Answer(UNVERIFIED, f"{says}, but {switch} is set")
    if switch.mapped:
        if any(file.startswith(switch.mapped) for file in evidence.mapped):
            return Answer(YES, f"{switch} is set, and {switch.mapped} is loaded")
        return Answer(UNVERIFIED, f"{switch} is set, but {switch.mapped} is not loaded")
    if queried:
        return Answer(YES, f"{says}, and {switch} is set")
    return Answer(UNVERIFIED, f"{switch} is set, but nothing tells whether {name} was built with CUDA")


def _has_cuda(evidence: Evidence) -> bool:
    """Return whether memory of `cudaMalloc` is among the kinds; before MPI 4.1 the key means nothing.

    Open MPI 5, which claims 3.1, gives back whatever somebody asked for.
    """
    kinds = {kind.strip().lower() for kind in evidence.memory_kinds.split(",")}
    return evidence.standard >= (4, 1) and not kinds.isdisjoint({"cuda", "cuda:device"})


def weakest(answers: Sequence[Answer]) -> Answer:
    """Return the answer for a job whose ranks found these: device pointers need every rank's yes."""
    verdict = min((answer.verdict for answer in answers), key=VERDICTS.index)
    reasons: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if answer.verdict == verdict:
            reasons.setdefault(answer.reason, []).append(rank)
    if len(reasons) == 1 and all(answer.verdict == verdict for answer in answers):
        return Answer(verdict, answers[0].reason)
    return Answer(verdict, "; ".join(f"{reason} ({ranks_in_words(ranks)})" for reason, ranks in reasons.items()))
