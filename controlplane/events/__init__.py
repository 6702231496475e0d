"""Package map of `controlplane.events`: written when its modules are."""
