"""Package map of `controlplane.reconcilers`: written when its modules are."""
