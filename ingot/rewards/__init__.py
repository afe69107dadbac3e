"""From an answer of the model to a number: the rewards that a recipe lists, each with a weight.
`build.py` makes them of their settings; `protocol.py` is all that a training sees of them. A reward
that fails or hangs on an answer is counted; one that is not there for any ends the attempt.
"""
