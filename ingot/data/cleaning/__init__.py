"""What `prepare` does to documents before they are tokenised: normal form, filters, deduplication,
contamination.
"""
