"""The Python interface: `ingot.load(recipe)` and `ingot.Model(folder)`. It starts the same verbs as
the command line and knows nothing that they do not know.
"""
