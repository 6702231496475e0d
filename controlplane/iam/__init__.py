"""Package map of `controlplane.iam`: written when its modules are."""
