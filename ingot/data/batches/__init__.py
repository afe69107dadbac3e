"""Columns into batches: the order of samples, rows, the loader, and prefetching of parts."""
