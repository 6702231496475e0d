"""Package map of `controlplane.queue`: written when its modules are."""
