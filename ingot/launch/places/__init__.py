"""The places where a job can run, one launcher per file. No torch."""
