"""Faults that a plan makes one rank suffer, for tests of what happens then."""
