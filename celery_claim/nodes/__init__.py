"""Which workers live, and which of them does what only one may do: register -> heartbeat -> lease -> leave."""
