"""Package map of `controlplane.capacity`: written when its modules are."""
