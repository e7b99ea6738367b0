"""Whether JAX traces the function that this thread is in.

In a trace there are no numbers yet: `jax.jit`, `grad`, `vmap`, `scan` and the like call a function to trace it.
A collective in it would run once for many calls of the compiled function, a write likewise, and a value that it reads
would be compiled in.  So this library refuses them all, whether their arguments are JAX's values or plain numbers.
"""

from __future__ import annotations

import sys

from mpistrategy.errors import ContextError

#: The guide's page on JAX has this sentence, too.
FIX = (
    "Pass values in as arguments, return results, and call this library between two compiled functions. Inside a "
    "compiled function, only mpi4jax communicates."
)


def in_jax_trace() -> bool:
    """Return whether JAX traces in this thread; 30 ns before JAX is imported, a fourth of a microsecond after."""
    # JAX has no public name for this.  The private name has existed since 2020, in every version.
    core = sys.modules.get("jax._src.core")
    is_outside = None if core is None else getattr(core, "trace_state_clean", None)
    return is_outside is not None and not is_outside()


def refuse_in_jax_trace(where: str) -> None:
    """Raise ContextError while JAX traces in this thread."""
    if in_jax_trace():
        raise ContextError.at(
            where,
            found="a call inside a function that JAX traces, which runs once for many calls of the compiled one",
            expected="a call outside of jit, grad, vmap, scan and the like",
            fix=FIX,
        )
