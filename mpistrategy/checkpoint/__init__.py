"""Checkpoints: the state of a program's objects on disk, restored on any number of ranks."""
