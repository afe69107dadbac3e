"""The pipeline's steps, their order, and which of them are up to date. Runs them as commands;
imports neither them nor torch.
"""
