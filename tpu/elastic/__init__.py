"""One run over several slices that loses a slice and not a step: members, their exchange, their coordinator."""
