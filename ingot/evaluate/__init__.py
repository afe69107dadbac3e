"""Evaluates a model on the recipe's tasks (loss, multiple choice, classification, ROUGE, lm-eval),
with confidence intervals, baselines and the base model beside it.
"""
