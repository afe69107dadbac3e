"""What ingot costs beside the usual libraries, measured together on one machine. Run as `python -m
benchmarks.spine`.
"""
