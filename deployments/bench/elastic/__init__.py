"""What one run over several slices costs and loses, on this machine; see `__main__`."""
