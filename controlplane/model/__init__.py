"""Package map of `controlplane.model`: written when its modules are."""
