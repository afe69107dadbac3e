"""Sources of documents: files, data sets of the Hugging Face hub, BigQuery, Wikipedia, existing
columns; and readers of record formats.
"""
