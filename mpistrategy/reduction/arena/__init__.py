"""Arenas: nests of arrays in memory that the ranks of a node share, reduced where they lie."""
