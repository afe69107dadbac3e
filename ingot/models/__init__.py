"""Decoders in pure PyTorch, their weights on disk, generation. Knows no parallelism and no
recipe.
"""
