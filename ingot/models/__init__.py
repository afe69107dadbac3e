"""Models in pure PyTorch, transformers' models behind the same interface, adapters, weights on
disk, and generation. Knows no parallelism and no recipe.
"""
