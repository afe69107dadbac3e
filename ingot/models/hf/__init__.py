"""Models in external formats: Hugging Face folders, transformers' own models behind the interface
of the native decoder, and Meta's original files.
"""
