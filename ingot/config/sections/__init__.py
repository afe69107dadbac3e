"""The sections of a recipe: one file for each group of knobs, and nothing but knobs."""
