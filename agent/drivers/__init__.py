"""Package map of `agent.drivers`: written when its modules are."""
