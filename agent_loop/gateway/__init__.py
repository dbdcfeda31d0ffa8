"""The OpenAI-compatible door: any agent program plays episodes, what the engines sampled is recorded exactly."""
