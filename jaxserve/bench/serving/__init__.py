"""A load generator for servers that speak OpenAI's HTTP API, whatever engine they run."""
