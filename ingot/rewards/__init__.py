"""From an answer of the model to a number: the rewards that a recipe lists, each with a weight.
`build.py` makes them of their settings; `protocol.py` is all that a training sees of them. A reward
that fails or hangs is counted and never ends a training.
"""
