"""What is measured: lists of gradients with the shapes of a real model, and of small arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """Return the 161 trainable arrays of ResNet-50 (He et al., 2015; 1000 classes): 25.6 million parameters."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]  # a convolution, then scale and offset of its normalization
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        outer = 4 * inner
        for block in range(blocks):
            for shape in ((inner, width_in, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:  # the shortcut changes the width
                shapes += [(outer, width_in, 1, 1), (outer,), (outer,)]
            width_in = outer
    return [*shapes, (1000, 2048), (1000,)]


def tiny1000() -> Shapes:
    """Return 1000 arrays of 1 to 1000 elements: nothing but overhead."""
    return [(int(size),) for size in np.random.default_rng(0).integers(1, 1001, 1000)]


LISTS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50, "tiny1000": tiny1000}
