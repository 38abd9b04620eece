"""Matrix products on GPUs: wide tiles, one token, several weights; how their Plans are chosen."""
