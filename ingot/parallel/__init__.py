"""Device meshes, and wrappers that are applied to a model from outside in one visible order."""
