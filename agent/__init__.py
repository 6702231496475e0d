"""Package map of `agent`: written when its modules are."""
