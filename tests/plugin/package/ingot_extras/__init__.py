"""Extensions of ingot, found by the entry points in pyproject.toml."""
