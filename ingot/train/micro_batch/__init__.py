"""`train.micro_batch: auto`: finds the micro-batch that fits by trial steps on random rows."""
