"""Package map of `fleetsim`: written when its modules are."""
