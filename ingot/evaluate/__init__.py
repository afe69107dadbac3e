"""Model to report: loss, perplexity and bits per byte on held-out documents, with honest baselines beside them."""
