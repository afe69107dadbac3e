"""Other inference servers (vLLM, Triton) started, watched and stopped as child processes."""
