"""A run as a web page and as terminal tables. Reads run folders only; never imports torch."""
