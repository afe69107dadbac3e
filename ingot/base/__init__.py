"""Foundations: storage, markers, events, locks, metrics, errors. Knows nothing of the rest of the
project and never imports torch.
"""
