"""Cleaning of documents before tokenisation: normal form, filters, deduplication, contamination."""
