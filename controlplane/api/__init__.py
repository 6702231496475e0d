"""Package map of `controlplane.api`: written when its modules are."""
