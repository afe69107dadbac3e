"""Which model is good, and which one is live: the gate, the versions, the live pointer. Never
imports torch.
"""
