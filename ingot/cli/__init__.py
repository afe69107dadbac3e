"""The command line: one function per verb. Whatever a verb needs is imported when it is called, so
that `ingot --help` is instant.
"""
