"""From sources to batches, one inner room for each stage of a document's path: sources, documents,
raw, cleaning, tokenizing, packing, columns, batches. `ingest.py` and `prepare.py` are the two
commands; engines do their work in other processes. Only `batches/loader.py` imports torch.
"""
