"""`ingot doctor --cloud`: what of Google Cloud a recipe needs, and whether it exists. No torch."""
