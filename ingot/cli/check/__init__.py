"""What is checked before the first step: `recipe` in order, sources, and the training itself."""
