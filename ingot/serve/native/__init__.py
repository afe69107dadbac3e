"""Generation in this process: the opened model, its batch, and the thread that runs it."""
