"""Package map of `controlplane.db`: written when its modules are."""
