"""Sources to documents, documents to token columns on disk, columns to batches. Only `loader`
imports torch.
"""
