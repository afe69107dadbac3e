"""Which steps there are, in what order, and which of them are done already. Runs them as commands;
imports none of them, nor torch.
"""
