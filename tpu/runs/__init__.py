"""What a run is: its configuration, its record in the bucket, and the driver that carries it to the end."""
