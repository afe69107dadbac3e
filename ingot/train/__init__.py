"""The loop: run builds, loop turns, step does the arithmetic, hooks have the side effects."""
