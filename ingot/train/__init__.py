"""Training: `trainer` is the order of life, `step` what happens in an optimizer step, hooks have
the side effects.
"""
