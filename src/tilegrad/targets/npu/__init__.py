"""A neural processing unit of one's own: parameters, instructions, and a simulator of it."""
