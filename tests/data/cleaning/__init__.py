"""Cleaning: normal form, filters, duplicates, contamination."""
