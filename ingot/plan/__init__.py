"""Predicts what a training needs before anything is paid for: memory, time and money, by running
the build and a step of the training itself on tensors without contents.
"""
