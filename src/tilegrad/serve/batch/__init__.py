"""Files of requests, answered without a port."""
