"""Meshes and wrappers, applied to a model from outside in one visible order."""
