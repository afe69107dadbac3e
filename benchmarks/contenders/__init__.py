"""Trainings that take turns, a program each: `python -m benchmarks.contenders.NAME task.json`. But
for `ours` and `peak` they run in the environments of the libraries that they are about, where
nothing of ingot is installed, and import nothing of it.
"""
