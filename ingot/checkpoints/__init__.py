"""Training checkpoints on disk and in a bucket; the exported model folder."""
