"""Where the work of `prepare` runs: this machine, Spark or Beam, with the same result."""
