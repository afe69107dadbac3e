"""Columns into batches: the order of samples, rows, the loader, and fetching parts ahead of
need.
"""
