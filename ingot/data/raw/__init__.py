"""`data/raw/`: ingested documents as Parquet, the tasks that write it, and the ranges in which it
is read.
"""
