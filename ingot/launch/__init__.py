"""Where a command runs. A launcher takes a Job, says whether it can run it, renders, submits and
follows it. No torch.
"""
