"""Model to report: how likely held-out documents are, choices, labels, texts that are written, with
honest baselines and the base model beside them.
"""
