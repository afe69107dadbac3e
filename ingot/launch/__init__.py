"""Where a command runs. A launcher takes a Job, says whether it can run it, renders it, submits it
and follows it. No torch.
"""
