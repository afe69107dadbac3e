"""Optimizers, their schedules, and averages of the weights."""
