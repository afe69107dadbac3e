"""Models as GGUF files, which llama.cpp and what is built on it read."""
