"""Package map of `shared`: written when its modules are."""
