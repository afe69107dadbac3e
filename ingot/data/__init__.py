"""From sources to batches, one inner room per stage: sources, documents, raw, cleaning, tokenizing,
packing, columns, batches. `ingest.py` and `prepare.py` are the two commands; engines run their work
in other processes. Only `batches/loader.py` imports torch.
"""
