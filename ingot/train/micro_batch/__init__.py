"""`train.micro_batch: auto`: the micro-batch that fits, found by trial steps on random rows."""
