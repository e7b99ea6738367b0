"""The programs that are driven by a case's inputs, by their recorded names: importing them registers them."""

from . import calls, input, placement, training, update, variables

__all__ = ["calls", "input", "placement", "training", "update", "variables"]
