"""One launcher a file: the places where a job can run. No torch."""
