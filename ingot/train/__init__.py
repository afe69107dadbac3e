"""Training: `trainer` builds everything in order, `step` is one optimizer step, hooks hold the side
effects.
"""
