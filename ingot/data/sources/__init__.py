"""What is read: files, data sets of the Hugging Face hub, BigQuery, Wikipedia, existing columns;
and the formats in which records are written down.
"""
