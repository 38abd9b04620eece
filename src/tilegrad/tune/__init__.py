"""Search for better Plans by measuring them."""
