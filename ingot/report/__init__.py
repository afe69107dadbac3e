"""A run as a page and as tables. Reads run folders only, and never imports torch."""
