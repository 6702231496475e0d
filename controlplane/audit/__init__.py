"""Package map of `controlplane.audit`: written when its modules are."""
