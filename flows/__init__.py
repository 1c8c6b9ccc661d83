"""The flows: read them and you know the product."""
