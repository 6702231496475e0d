"""Package map of `controlplane.cli`: written when its modules are."""
