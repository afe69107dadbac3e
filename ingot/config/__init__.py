"""All knobs, and arithmetic on knobs. Never imports torch."""
