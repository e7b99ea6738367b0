"""For models in JAX: pytrees in collectives and checkpoints.

    import mpistrategy as ms
    import mpistrategy.jax as msj

    strategy = ms.MirroredStrategy()
    parameters = msj.broadcast(parameters, strategy=strategy)
    ...
    gradients = msj.average_gradients(compiled_gradients(parameters, rows), strategy=strategy)
    parameters, state = compiled_update(parameters, state, gradients)

Call them between compiled functions: in a function that JAX traces, everything of mpistrategy is refused.  Nothing of
JAX is imported before this package is.
"""

from mpistrategy.jax.trees import Tree, all_gather, all_reduce, average_gradients, broadcast

__all__ = ["Tree", "all_gather", "all_reduce", "average_gradients", "broadcast"]


def __dir__() -> list[str]:
    return list(__all__)
