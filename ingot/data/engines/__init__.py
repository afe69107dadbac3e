"""Where the work of `prepare` runs: this machine, Spark, Beam. The work is the same everywhere."""
