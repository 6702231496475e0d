"""Package map of `controlplane.fleet`: written when its modules are."""
