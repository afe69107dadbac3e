"""The native decoder family in pure PyTorch: configuration, rotary positions, attention, layers,
head. Knows no parallelism, no files and no recipe.
"""
