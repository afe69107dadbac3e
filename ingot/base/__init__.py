"""The ground: files, markers, events, locks, metrics, errors. Knows no word of the project and
never imports torch.
"""
