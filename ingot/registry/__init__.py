"""Model registry and gate: registered versions, the decision to deploy, the live pointer. Never
imports torch.
"""
