"""Supervision of a job's ranks, wherever they run: attempts, hangs, restarts and the budget. No
torch.
"""
