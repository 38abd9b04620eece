"""What clients send and get: OpenAI's and Anthropic's bodies, read, checked and written."""
