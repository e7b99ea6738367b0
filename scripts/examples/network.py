"""The network of scripts/examples/network_numpy.py on several ranks: five lines are changed, and the numbers are equal.

    mpiexec -n 3 python scripts/examples/network.py

`main` runs in a step, so all ranks make the same variables in it.  Each rank takes its share of a mini-batch, and
`assign_sub` subtracts the sum of what the ranks give.  Everything else every rank does alike, also what it prints.
"""

from itertools import pairwise

import numpy as np

import mpistrategy as ms

random = np.random.default_rng(0)


def start(rows, columns):
    """Return the start values of the weights or the biases of a layer."""
    return ms.Variable(random.normal(size=(rows, columns)) / np.sqrt(columns), aggregation="SUM")


def sigmoid(z):
    """Return the activations of a layer."""
    return 1 / (1 + np.exp(-z))


class Network:
    """A network of layers, each with every neuron of the one before as input."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.biases = [start(n, 1) for n in sizes[1:]]
        self.weights = [start(n, m) for m, n in pairwise(sizes)]

    def feedforward(self, a):
        """Return the output for the inputs `a`, a column each."""
        for b, w in zip(self.biases, self.weights, strict=True):
            a = sigmoid(w.dot(a) + b)
        return a

    def SGD(self, training, epochs, size, eta, test):  # noqa: N802
        """Train by mini-batches of `size` points, with the learning rate `eta`."""
        for epoch in range(epochs):
            order = random.permutation(len(training))
            for k in range(0, len(order), size):
                self.update_mini_batch([training[i] for i in order[k : k + size]], eta)
            print(f"epoch {epoch + 1}: {self.evaluate(test)} of {len(test)} right, cost {self.cost(test):.12f}")

    def update_mini_batch(self, mini_batch, eta):
        """Change weights and biases by the mean of the gradients of a mini-batch."""
        nabla_b = [np.zeros(b.shape) for b in self.biases]
        nabla_w = [np.zeros(w.shape) for w in self.weights]
        for x, y in mini_batch[ms.get_replica_context().replica_id_in_sync_group :: ms.get_strategy().size]:
            delta_b, delta_w = self.backprop(x, y)
            nabla_b = [nb + d for nb, d in zip(nabla_b, delta_b, strict=True)]
            nabla_w = [nw + d for nw, d in zip(nabla_w, delta_w, strict=True)]
        for parameter, nabla in zip(self.biases + self.weights, nabla_b + nabla_w, strict=True):
            parameter.assign_sub(eta / len(mini_batch) * nabla)

    def backprop(self, x, y):
        """Return the gradients of the cost of one point, by the biases and by the weights."""
        nabla_b = [np.zeros(b.shape) for b in self.biases]
        nabla_w = [np.zeros(w.shape) for w in self.weights]
        activations = [x]
        for b, w in zip(self.biases, self.weights, strict=True):
            activations.append(sigmoid(w.dot(activations[-1]) + b))
        delta = self.cost_derivative(activations[-1], y) * activations[-1] * (1 - activations[-1])
        for layer in range(1, len(self.sizes)):
            nabla_b[-layer] = delta
            nabla_w[-layer] = delta.dot(activations[-layer - 1].transpose())
            before = activations[-layer - 1]
            delta = self.weights[-layer].transpose().dot(delta) * before * (1 - before)
        return nabla_b, nabla_w

    def cost_derivative(self, output, y):
        """Return the derivative of half the squared distance by the output."""
        return output - y

    def cost(self, points):
        """Return the mean cost of points."""
        return np.mean([((self.feedforward(x) - y) ** 2).sum() / 2 for x, y in points])

    def evaluate(self, points):
        """Return for how many points the greatest output is the right one."""
        return sum(int(self.feedforward(x).argmax() == y.argmax()) for x, y in points)


def spiral(points):
    """Return points of the plane, each a column, with the arm that each lies on: a column with a 1."""
    arms, turns = random.integers(3, size=points), random.uniform(0.2, 1, size=points)
    angles = 2 * np.pi * (arms / 3 + 0.6 * turns)
    at = np.stack([turns * np.cos(angles), turns * np.sin(angles)], axis=1) + random.normal(0, 0.03, (points, 2))
    return [(4 * x.reshape(2, 1), np.eye(3)[:, [arm]]) for x, arm in zip(at, arms, strict=True)]


def main():
    """Train a network, and say after each epoch how well it does on points that it has not seen."""
    training, test = spiral(300), spiral(200)
    Network([2, 12, 3]).SGD(training, epochs=5, size=10, eta=6.0, test=test)


if __name__ == "__main__":
    ms.MirroredStrategy().run(main)
