"""Replay of what TensorFlow's tf.distribute was recorded to do, against mpistrategy under real MPI.

cases/            the recordings, one case a line; a case that is a program of its own has the program's source
values.py         the recordings' spelling of values: to NumPy, from NumPy, and what one rank sees of them
compare.py        are two values the same? the table of roundings
environment.py    what a program may use: this rank's strategy, per-replica inputs, notes
tensorflow.py     runs a recorded source, with a stand-in for the module `tf`
programs/         the programs that are driven by a case's inputs: one small function each
judge.py          does an outcome agree with the recording? kinds of error, verdicts
deviations.toml   the reviewed tables: how recordings are read, and what may differ; rules.py reads them
replay.py         replays cases on the ranks of one job
launch.py         starts the jobs, survives those that die, prints the report
"""
