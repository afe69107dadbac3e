"""The steps of cleaning, in the order in which they run: filters, exact duplicates,
near-duplicates, contamination.
"""
