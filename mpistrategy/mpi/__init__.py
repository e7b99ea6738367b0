"""Bytes between ranks: the only place that says rank, root and MPI."""
