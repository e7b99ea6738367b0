"""Replay of what TensorFlow's tf.distribute was recorded to do, against mpistrategy under real MPI.

cases/             the recordings, one JSON file an area
values.py          the recordings' spelling of values: to NumPy, from NumPy, and what one rank sees of them
registry.py        the interpreter functions by program name
programs_*.py      one small function a program: what it means, said with mpistrategy
environment.py     what a program may use: this rank's strategy, per-replica inputs, notes
compare.py         are two values the same? the table of roundings
judge.py           does an outcome agree with the recording? kinds of error
deviations.toml    the reviewed table of what may differ, by program and condition; deviations.py reads it
runner.py          replays cases on the ranks of one job
launch.py          starts the jobs, survives those that die, prints the report
"""
