"""The kinds of objects that checkpoints keep: one `Kind` each, in this table.

The first kind that owns an object saves it.  So kinds that ask for methods stand after those that ask for a class.
"""

from mpistrategy.checkpoint.kinds import containers, generators, values, variables
from mpistrategy.checkpoint.state import Kind

KINDS: tuple[Kind, ...] = (
    values.Plain(),
    variables.OneVariable(),
    variables.AnyOptimizer(),
    variables.Accumulator(),
    values.GlobalRows(),
    containers.Component(),
    containers.Dict(),
    containers.List(),
    containers.Tuple(),
    generators.RankStreams(),
    generators.Generator(),
    values.Scalar(),
    generators.Position(),
    values.Tensor(),
    values.AnyArray(),
    containers.Module(),
    containers.StatefulObject(),
    containers.WithVariables(),
)
