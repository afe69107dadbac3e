"""Programs that behave as the processes of vLLM and of Triton do, for machines where neither is
installed.
"""
