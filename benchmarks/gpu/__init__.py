"""One GPU, one command: `python -m benchmarks.gpu --minutes 10`, from a bare checkout with the
machine's own torch.

Rows in the order of their worth: what is right (`attention`, `families`, `training`, `memory`,
`resume`, `serving`), how fast it is (`ceilings`, `steps`, `trainer`, `kernels`, `generation`), and
what `ingot plan` had said (`planned`). Each row is a process of its own and a line of the results
as soon as it is done.
"""
