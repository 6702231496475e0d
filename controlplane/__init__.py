"""Package map of `controlplane`: written when its modules are."""
