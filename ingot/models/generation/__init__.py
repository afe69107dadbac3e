"""Generation: continuous batching, sampling, sequence-to-sequence models and classifiers. Knows no
HTTP and no tokenizer.
"""
