"""How fast and how fair: commands that measure the product."""
