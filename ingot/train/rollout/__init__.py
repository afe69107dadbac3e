"""Batches that a training makes itself: prompts in, sampled and judged answers out. Entered only
by an objective whose settings say `samples_answers`.
"""
