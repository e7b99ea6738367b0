"""Distributed input: each rank's part of every global batch."""
