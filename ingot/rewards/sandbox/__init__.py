"""Runs code that nobody has read: without network, files, environment or other processes, within
limits of time and memory, and judged from outside so that it cannot forge its verdict. Linux only.

`run.py` starts two sandboxes, and everything else runs inside them with the standard library alone:
`enclose.py` shuts the process in, `answer.py` holds the code, `judge.py` the tests,
`stand_in.py` what stands there for its objects, `operations.py` is what may be done with these, and
`values.py` what passes between the two.
"""
