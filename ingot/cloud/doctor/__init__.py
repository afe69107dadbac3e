"""`ingot doctor --cloud`: what a recipe needs of Google Cloud, and whether it exists. No torch."""
