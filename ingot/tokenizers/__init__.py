"""Text to ids and back, exactly as the reference tokenizer does it. Never imports torch or
transformers.
"""
