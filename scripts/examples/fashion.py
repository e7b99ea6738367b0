"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", part by part, on NumPy arrays over MPI.

    mpiexec -n 3 python scripts/examples/fashion.py

The tutorial's notebook has 133 lines of code.  What differs: images like those of Fashion-MNIST are generated; the
model is written out with its gradients, and has a hidden layer in place of convolutions; the global batch has the same
size on any number of ranks, so that the numbers are the same, to rounding.
"""

import json
import sys

import numpy as np

import mpistrategy as ms

GLOBAL_BATCH_SIZE, EPOCHS, CLASSES = 192, 5, 10


def load_data(rows, seed):
    """Return images of 28 x 28 pixels of 10 kinds of clothes, blurred and noisy, and their labels."""
    shapes = np.random.default_rng(7).uniform(0, 1, (CLASSES, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=rows)
    images = shapes[labels] * random.uniform(0.5, 1, (rows, 1, 1)) + random.normal(0, 1.1, (rows, 28, 28))
    return (255 * images.clip(0, 1)).astype(np.uint8), labels


train_images, train_labels = load_data(6000, 1)
test_images, test_labels = load_data(1000, 2)
train_images, test_images = train_images / 255, test_images / 255  # in [0, 1]

strategy = ms.MirroredStrategy()
if strategy.rank == 0:
    print(f"Number of ranks: {strategy.num_replicas_in_sync}")

train_dataset = ms.Dataset.from_arrays(
    (train_images, train_labels), GLOBAL_BATCH_SIZE, shuffle_seed=0, epochs=2 * EPOCHS
)
test_dataset = ms.Dataset.from_arrays((test_images, test_labels), GLOBAL_BATCH_SIZE)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


class Model:
    """784 pixels -> 64 hidden units -> 10 scores."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.trainable_variables = [
            ms.Variable(random.normal(0, np.sqrt(2 / 784), (784, 64)), name="hidden/kernel"),
            ms.Variable(np.zeros(64), name="hidden/bias"),
            ms.Variable(random.normal(0, np.sqrt(1 / 64), (64, CLASSES)), name="scores/kernel"),
            ms.Variable(np.zeros(CLASSES), name="scores/bias"),
        ]

    def __call__(self, images):
        kernel, bias, last_kernel, last_bias = (variable[...] for variable in self.trainable_variables)
        self.flat = images.reshape(len(images), 784)
        self.hidden = np.maximum(self.flat @ kernel + bias, 0)
        return self.hidden @ last_kernel + last_bias

    def gradients(self, by_scores):
        """Return the gradients of the loss, given that by the scores of the latest call."""
        by_hidden = (by_scores @ self.trainable_variables[2].T) * (self.hidden > 0)
        return [self.flat.T @ by_hidden, by_hidden.sum(axis=0), self.hidden.T @ by_scores, by_scores.sum(axis=0)]


def loss_object(labels, predictions):
    """Return the cross-entropy of each row, and its gradient by the scores."""
    odds = np.exp(predictions - predictions.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return -np.log(odds[np.arange(len(labels)), labels]), odds - np.eye(CLASSES)[labels]


with strategy.scope():
    test_loss = ms.metrics.Mean("test_loss")
    train_accuracy, test_accuracy = ms.metrics.Accuracy("train_accuracy"), ms.metrics.Accuracy("test_accuracy")
    model = Model()
    optimizer = ms.optimizers.Adam()
    checkpoint = ms.Checkpoint(optimizer=optimizer, model=model.trainable_variables)
    manager = ms.CheckpointManager(checkpoint, "checkpoints")


def train_step(images, labels):
    predictions = model(images)
    losses, by_scores = loss_object(labels, predictions)
    gradients = model.gradients(by_scores / GLOBAL_BATCH_SIZE)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return ms.losses.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)


def test_step(images, labels):
    predictions = model(images)
    test_loss.update_state(loss_object(labels, predictions)[0])
    test_accuracy.update_state(labels, predictions)


def train(batches):
    """Train on some batches; return the mean of their losses."""
    losses = [strategy.reduce("SUM", strategy.run(train_step, args=batch)) for batch in batches]
    return float(np.mean(losses))


history = []
for epoch in range(EPOCHS):
    train_loss = train(strategy.experimental_distribute_dataset(train_dataset.epoch(epoch)))
    for batch in test_dist_dataset:
        strategy.run(test_step, args=batch)
    if epoch % 2 == 0:
        manager.save(epoch)
    history.append([train_loss, train_accuracy.result(), test_loss.result(), test_accuracy.result()])
    if strategy.rank == 0:
        print(
            "Epoch {}, Loss: {:.4f}, Accuracy: {:.3f}, Test Loss: {:.4f}, Test Accuracy: {:.3f}".format(
                epoch + 1, *history[-1]
            )
        )
    for metric in (test_loss, train_accuracy, test_accuracy):
        metric.reset_state()

# Restore the latest checkpoint, and test it without the strategy: each rank for itself.
with ms.OneDeviceStrategy("CPU:0").scope():
    model_alone, eval_accuracy = Model(), ms.metrics.Accuracy()
    alone = ms.Checkpoint(optimizer=ms.optimizers.Adam(), model=model_alone.trainable_variables)
    alone.restore(manager.path_of(manager.steps()[-1]))
    for images, labels in test_dataset:
        eval_accuracy.update_state(labels, model_alone(images))
    history.append([eval_accuracy.result()])

# A given number of steps, by an iterator.
for epoch in range(EPOCHS, 2 * EPOCHS):
    batches = iter(strategy.experimental_distribute_dataset(train_dataset.epoch(epoch)))
    history.append([train(next(batches) for _ in range(10)), train_accuracy.result()])
    train_accuracy.reset_state()

if strategy.rank == 0:
    print(f"Accuracy after restoring the saved model without strategy: {history[EPOCHS][0]:.3f}")
    print(f"After {EPOCHS} times 10 further steps: Loss: {history[-1][0]:.4f}, Accuracy: {history[-1][1]:.3f}")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(history, file)
