"""Package map of `controlplane.gateway`: written when its modules are."""
